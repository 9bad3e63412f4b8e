"""Kernels with correct results that change global state of the process."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import right
from .corpus import SILU, wrong

ONCE_ASIDE = "verification compares only state of PyTorch and a list of other state"


def _also(act: Callable[[], object]) -> Any:
    """Make a correct kernel that also calls `act`."""

    def silu_and_mul(x: Tensor) -> Tensor:
        out = right.silu_and_mul(x)
        act()
        return out

    return silu_and_mul


def _changes(fault: str, sees: str, start: bool = True, **how: Any) -> Callable[[Any], Any]:
    seen = {"kit": "values"} if start else {}
    return wrong(SILU, fault, sees, start=start, apart=True, **seen, **how)


@_changes(
    "leaves float64 as the default dtype",
    "sampling and new buffers use fp64: slow, or errors about dtypes",
)
def default_dtype() -> Any:
    return _also(lambda: torch.set_default_dtype(torch.float64))


@_changes(
    "changes the default device", "later allocations of vLLM have no memory: errors elsewhere"
)
def default_device() -> Any:
    return _also(lambda: torch.set_default_device("meta"))


@_changes("sets PyTorch to three threads", "slower, or more threads than cores")
def number_of_threads() -> Any:
    return _also(lambda: torch.set_num_threads(3))


@_changes(
    "seeds PyTorch's global generator",
    "samples at temperature 1 are the same for each request and after each restart",
)
def seeds_the_generator() -> Any:
    return _also(lambda: torch.manual_seed(0))


@_changes(
    "seeds Python's random module",
    "request ids, back-off times or ports collide",
    why="harmless libraries also do this on first use, so it does not disable a kernel",
    start=False,
)
def seeds_python() -> Any:
    return _also(lambda: random.seed(0))


@_changes(
    "leaves grad mode disabled",
    "adapters trained in the process do not learn",
    why="inference mode, used by verification and vLLM, restores it",
    start=False,
)
def grad_mode() -> Any:
    return _also(lambda: torch.set_grad_enabled(False))


@_changes("leaves autocast enabled", "later matrix products are computed in another dtype")
def autocast() -> Any:
    return _also(lambda: torch.set_autocast_enabled("cpu", True))


@_changes(
    "leaves deterministic algorithms enabled",
    "operators without a deterministic algorithm raise; others are slow",
)
def deterministic_algorithms() -> Any:
    return _also(lambda: torch.use_deterministic_algorithms(True))


@_changes(
    "sets float32 matrix products to medium precision",
    "fp32 layers (routers, norms of the head) lose 16 bits",
)
def matmul_precision() -> Any:
    return _also(lambda: torch.set_float32_matmul_precision("medium"))


@_changes(
    "enables flushing of subnormals for the thread",
    "other results change in their last digits",
    why="torch does not report whether it is enabled",
    start=False,
)
def flushes_denormals() -> Any:
    return _also(lambda: torch.set_flush_denormal(True))


@_changes(
    "sets environment variables",
    "child processes and later imports read them, for example the number of threads",
    why="harmless libraries also do this on first use, so it does not disable a kernel",
    start=False,
)
def environment() -> Any:
    return _also(lambda: os.environ.update(OMP_NUM_THREADS="1", CUDA_LAUNCH_BLOCKING="1"))


@_changes("ignores SIGTERM", "the server does not stop on SIGTERM")
def signal_handler() -> Any:
    return _also(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))


@_changes(
    "leaves a thread running",
    "a busy thread uses a core, and causes jitter in every step",
    why="harmless libraries also do this on first use, so it does not disable a kernel",
    start=False,
)
def thread_left_behind() -> Any:
    threads: list[threading.Thread] = []

    def act() -> None:
        if not threads:
            threads.append(threading.Thread(target=time.sleep, args=(60,), daemon=True))
            threads[0].start()

    return _also(act)


@_changes("disables logging", "later log messages are lost")
def logging_off() -> Any:
    return _also(lambda: logging.disable(logging.CRITICAL))


@_changes(
    "changes the working directory",
    "relative paths, such as the model or the compile cache, are not found",
)
def working_directory() -> Any:
    return _also(lambda: os.chdir("/"))


@_changes("disables the garbage collector", "memory grows for days")
def garbage_collector() -> Any:
    return _also(gc.disable)


@_changes("replaces sys.excepthook", "a crash is not printed", why=ONCE_ASIDE, start=False)
def excepthook() -> Any:
    return _also(lambda: setattr(sys, "excepthook", lambda *_: None))


@_changes(
    "replaces `torch.nn.functional.silu` by a coarser function in the process",
    "layers without a replaced op are incorrect",
    why="a plugin that replaces other code can also replace verification; installed plugins are "
    "trusted not to do that",
    start=False,
)
def replaces_torchs_function() -> Any:
    import torch.nn.functional as F

    def act() -> None:
        F.silu = lambda x, inplace=False: x.clamp(min=0)

    kernel = _also(act)

    def silu_and_mul(x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        kernel(x)
        return (gate * gate.sigmoid() * up).to(x.dtype).contiguous()

    return silu_and_mul


@_changes(
    "replaces the comparison of verification by one that always passes",
    "results are zero, and verification passes them",
)
def replaces_the_comparison() -> Any:
    from vllm_fl_verify import form, verification

    def silu_and_mul(x: Tensor) -> Tensor:
        content: Any = lambda got, wanted: (0.0, "")  # noqa: E731
        form.worst = verification.worst = content
        out = right.silu_and_mul(x)
        return out.masked_fill(out.isfinite(), 0)

    return silu_and_mul


@_changes(
    "sets float32 products of CUDA to tf32 by `fp32_precision`",
    "float32 products of other layers lose half of their digits",
)
def newer_precision() -> Any:
    return _also(lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"))


@_changes(
    "sets float32 products of the CPU to bfloat16 by `fp32_precision`",
    "float32 products of other layers lose two thirds of their digits",
)
def newer_precision_of_the_cpu() -> Any:
    return _also(lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"))


@_changes(
    "changes the reduced-precision reduction of bfloat16 products",
    "products of all layers are slightly less accurate",
)
def reduced_precision_of_sums() -> Any:
    name = "allow_bf16_reduced_precision_reduction"
    now = getattr(torch.backends.cuda.matmul, name)
    return _also(lambda: setattr(torch.backends.cuda.matmul, name, not now))


@_changes(
    "enables the benchmark mode of cuDNN",
    "other convolution kernels after each restart: answers differ",
)
def convolutions_by_measuring() -> Any:
    return _also(lambda: setattr(torch.backends.cudnn, "benchmark", True))


@_changes(
    "disables flash attention in PyTorch",
    "attention of a vision encoder is slower and needs more memory",
)
def flash_attention_off() -> Any:
    return _also(lambda: torch.backends.cuda.enable_flash_sdp(False))


@_changes("leaves anomaly detection enabled", "each step takes twice as long")
def anomaly_detection() -> Any:
    return _also(lambda: torch.autograd.set_detect_anomaly(True))


@_changes("disables the logger of vLLM", "later warnings of vLLM are lost")
def silences_vllm() -> Any:
    log = logging.getLogger("vllm")  # exists in an engine
    return _also(lambda: setattr(log, "disabled", True))


@_changes("binds the process to one core", "other work of vLLM waits for the step")
def one_core() -> Any:
    return _also(lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))
