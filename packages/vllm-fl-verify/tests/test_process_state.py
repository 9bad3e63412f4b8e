"""Process state changed by a kernel is reported and restored; changes by others stay."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from of_acme import acme, silu_and_mul
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from vllm_fl.contracts import ModelSizes
from vllm_fl.plugins.types import OpImpl
from vllm_fl_verify import process_state
from vllm_fl_verify.preflight import Findings, find_faults
from vllm_fl_verify.trials import Request, Role

SIZES = ModelSizes(16, 16, 2, 1, 8, 8, tokens=(1, 8))
CPU = torch.device("cpu")
KEY = ("silu_and_mul", "vendor.acme")


def found_in(*changes: Callable[[], object], sizes: ModelSizes | None = None) -> Findings:
    """Findings of startup for correct kernels, each with one of these changes."""

    def kernel(change: Callable[[], object], number: int) -> OpImpl:
        def fn(x: Tensor) -> Tensor:
            result = silu_and_mul(x)
            change()
            return result

        return acme("silu_and_mul", fn, f"acme{number or ''}")

    impls = [kernel(change, number) for number, change in enumerate(changes)]
    return find_faults(Request([*map(Role, impls)], torch.float32, CPU, sizes, calls=0))


def nothing() -> None:
    """No change."""


def fault_of(change: Callable[[], object]) -> str:
    return found_in(change).objections[KEY].reason


def put(module: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(module, name, value)


matmul, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
OLDER = "the precision of float32 products from highest to an unreadable value"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for other threads, which change nothing here."""
    monkeypatch.setattr(process_state, "QUIET", 0.001)


PRECISIONS: list[tuple[Callable[[], object], str]] = [
    (put(matmul, "fp32_precision", "tf32"), OLDER),
    (put(cudnn, "fp32_precision", "tf32"), OLDER),
    # Reported by cuDNN's older switch, or directly if the process has set the newer one before.
    (put(torch.backends, "fp32_precision", "ieee"), "it changed "),
    (put(cudnn.conv, "fp32_precision", "ieee"), "it changed "),
    (put(mkldnn.matmul, "fp32_precision", "bf16"), OLDER),
    (put(mkldnn.conv, "fp32_precision", "bf16"), "of torch.backends.mkldnn.conv from none"),
]


@pytest.mark.usefixtures("alone")
def test_a_precision_in_its_newer_form_is_named_and_put_back() -> None:
    before = process_state.state_of(CPU)
    try:
        found = found_in(*(change for change, _ in PRECISIONS), nothing).objections
        assert torch.get_float32_matmul_precision() == "highest"
        assert process_state.changed(before, CPU) is None
    finally:
        torch.set_float32_matmul_precision("highest")  # for other tests, if it was not restored
        set_as_at_first()
    assert len(found) == len(PRECISIONS), "the one that is right is tried, and has no fault"
    for (_, said), fault in zip(PRECISIONS, found.values(), strict=True):
        assert said in fault.reason


def set_as_at_first() -> None:
    """Reset precisions that the older setter also sets."""
    matmul.fp32_precision = mkldnn.matmul.fp32_precision = "none"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("older", ["highest", "medium"])
def test_a_precision_in_its_newer_form_after_a_worker_called_the_older_setter(older: str) -> None:
    torch.set_float32_matmul_precision(older)
    try:
        before = process_state.state_of(CPU)
        for name in ("tf32", "ieee"):
            found = found_in(put(matmul, "fp32_precision", name), nothing).objections
            assert torch.get_float32_matmul_precision() == older
            assert process_state.changed(before, CPU) is None
            changes = name != before.values["the fp32_precision of torch.backends.cuda.matmul"]
            assert set(found) == ({KEY} if changes else set())
    finally:
        torch.set_float32_matmul_precision("highest")
        set_as_at_first()


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def dispatching() -> None:
    if not _get_current_dispatch_mode_stack():
        Dispatching().__enter__()


def no_more_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))


SWITCHES: list[tuple[Callable[[], object], str]] = [
    (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
    (lambda: torch.rand(1), "the random state of the CPU"),
    (lambda: torch.manual_seed(0), "the random state of the CPU"),
    (lambda: torch.set_default_device("meta"), "the default device from cpu to meta"),
    (lambda: torch.set_autocast_enabled("cpu", True), "autocast from False to True"),
    (lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), "the signal handlers"),
    (lambda: os.chdir("/"), "the working directory"),
    (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "the number of threads"),
    (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        "the deterministic mode from off to on, with warnings",
    ),
    (lambda: torch.set_float32_matmul_precision("medium"), "the precision of float32 products"),
    (gc.disable, "whether the garbage collector is enabled from True to False"),
    (lambda: logging.disable(logging.INFO), "the level of logging.disable"),
    (put(matmul, "allow_fp16_accumulation", True), "the accumulation of float16 products"),
    (put(matmul, "allow_bf16_reduced_precision_reduction", False), "sums of bf16 products"),
    (put(matmul, "allow_fp16_reduced_precision_reduction", False), "sums of fp16 products"),
    (put(cudnn, "allow_tf32", False), "cuDNN's TF32 from True to False"),
    (put(cudnn, "benchmark", True), "cuDNN's benchmark from False to True"),
    (put(cudnn, "deterministic", True), "cuDNN's determinism from False to True"),
    (lambda: torch.backends.cuda.enable_flash_sdp(False), "whether flash attention is enabled"),
    (lambda: torch.backends.cuda.enable_math_sdp(False), "whether math attention is enabled"),
    (lambda: torch.backends.cuda.enable_mem_efficient_sdp(False), "memory-efficient attention"),
    (lambda: torch._C._set_mkldnn_enabled(False), "whether oneDNN is enabled from True to False"),
    (lambda: torch.autograd.set_detect_anomaly(True), "torch's anomaly mode"),
    (lambda: Watching().__enter__(), "torch's function modes"),
    (dispatching, "torch's dispatch modes"),
    (lambda: torch.device("meta").__enter__(), "the default device from cpu to meta"),
    (put(logging.getLogger("vllm"), "disabled", True), "vLLM's loggers"),
    (lambda: logging.getLogger("vllm_fl").setLevel(logging.CRITICAL), "vLLM's loggers"),
    (lambda: logging.getLogger().addFilter(lambda record: False), "vLLM's loggers"),
    (lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]), "the CPU affinity"),
    (lambda: os.umask(0o777), "the umask from 00"),
    (no_more_files, "the limit of open files"),
]


@pytest.mark.usefixtures("alone")
def test_a_switch_of_the_process_is_named_and_put_back() -> None:
    before = process_state.state_of(CPU)
    one = len(os.sched_getaffinity(0)) == 1
    changes = [pair for pair in SWITCHES if not (one and "CPUs" in pair[1])]
    try:
        found = found_in(*(change for change, _ in changes)).objections
        assert process_state.changed(before, CPU) is None
    finally:  # if it was not restored
        process_state.restore(before, CPU)
    for number, (_, said) in enumerate(changes):
        key = ("silu_and_mul", f"vendor.acme{number or ''}")
        assert said in found[key].reason, said


def test_it_is_cheap_and_sets_nothing_that_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU worker warns of each call of torch.set_num_threads."""
    called: list[str] = []
    for name in ("set_num_threads", "use_deterministic_algorithms", "set_default_dtype"):
        monkeypatch.setattr(torch, name, lambda *_, name=name, **__: called.append(name))
    assert not found_in(nothing).objections and called == []
    took = []
    for _ in range(20):
        begun = time.perf_counter()
        process_state.state_of(CPU)
        took.append(time.perf_counter() - begun)
    assert min(took) < 0.001


def test_a_mode_that_only_warns_is_restored_as_such() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert found_in(lambda: torch.use_deterministic_algorithms(False)).objections
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def another_thread(step: Callable[[], object], pause: float) -> Iterator[None]:
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(pause):
            step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("pause", [0.001, 0.1])
def test_random_numbers_that_another_thread_draws_are_its_own(pause: float) -> None:
    torch.manual_seed(7)
    drawn: list[float] = []
    with another_thread(lambda: drawn.append(float(torch.rand(1))), pause):
        found = found_in(nothing, nothing, sizes=SIZES)
    assert not found.objections
    assert len(set(drawn)) == len(drawn), "no number is drawn twice"
    if pause < 0.05:
        assert any("the random state of the CPU" in remark for remark in found.remarks)


def test_what_another_thread_sets_again_and_again_is_its_own() -> None:
    def step() -> None:
        torch.set_default_dtype(torch.float64)
        time.sleep(0.02)
        torch.set_default_dtype(torch.float32)

    with another_thread(step, 0.02):
        for _ in range(3):
            assert not found_in(nothing).objections
    assert torch.get_default_dtype() is torch.float32


def test_a_kernel_that_draws_is_named_beside_a_thread_that_seldom_does() -> None:
    with another_thread(lambda: torch.rand(1), 5.0):
        assert "changed the random state of the CPU" in fault_of(lambda: torch.rand(1))


def test_what_is_set_once_as_by_an_import_is_named() -> None:
    done: list[bool] = []

    def once() -> None:
        if not done:
            torch.set_default_dtype(torch.float64)
        done.append(True)

    assert "changed the default dtype" in fault_of(once)
    assert torch.get_default_dtype() is torch.float32
