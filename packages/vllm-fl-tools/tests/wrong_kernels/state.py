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
HARMLESS = {
    "start": False,
    "why": "harmless libraries also do this on first use, so it does not disable a kernel",
}


def _also(act: Callable[[], object]) -> Any:
    """Make a correct kernel that also calls `act`."""

    def silu_and_mul(x: Tensor) -> Tensor:
        out = right.silu_and_mul(x)
        act()
        return out

    return silu_and_mul


def _changes(sees: str, start: bool = True, **how: Any) -> Callable[[Any], Any]:
    seen = {"kit": "values"} if start else {}
    return wrong(SILU, sees, start=start, apart=True, **seen, **how)


@_changes("sampling and new buffers use fp64: slow, or errors about dtypes")
def default_dtype() -> Any:
    """Leaves float64 as the default dtype."""
    return _also(lambda: torch.set_default_dtype(torch.float64))


@_changes("later allocations of vLLM have no memory: errors elsewhere")
def default_device() -> Any:
    """Changes the default device."""
    return _also(lambda: torch.set_default_device("meta"))


@_changes("slower, or more threads than cores")
def number_of_threads() -> Any:
    """Sets PyTorch to three threads."""
    return _also(lambda: torch.set_num_threads(3))


@_changes("samples at temperature 1 are the same for each request and after each restart")
def seeds_the_generator() -> Any:
    """Seeds PyTorch's global generator."""
    return _also(lambda: torch.manual_seed(0))


@_changes("request ids, back-off times or ports collide", **HARMLESS)
def seeds_python() -> Any:
    """Seeds Python's random module."""
    return _also(lambda: random.seed(0))


@_changes(
    "adapters trained in the process do not learn",
    why="inference mode, used by verification and vLLM, restores it",
    start=False,
)
def grad_mode() -> Any:
    """Leaves grad mode disabled."""
    return _also(lambda: torch.set_grad_enabled(False))


@_changes("later matrix products are computed in another dtype")
def autocast() -> Any:
    """Leaves autocast enabled."""
    return _also(lambda: torch.set_autocast_enabled("cpu", True))


@_changes("operators without a deterministic algorithm raise; others are slow")
def deterministic_algorithms() -> Any:
    """Leaves deterministic algorithms enabled."""
    return _also(lambda: torch.use_deterministic_algorithms(True))


@_changes("fp32 layers (routers, norms of the head) lose 16 bits")
def matmul_precision() -> Any:
    """Sets float32 matrix products to medium precision."""
    return _also(lambda: torch.set_float32_matmul_precision("medium"))


@_changes(
    "other results change in their last digits",
    why="torch does not report whether it is enabled",
    start=False,
)
def flushes_denormals() -> Any:
    """Enables flushing of subnormals for the thread."""
    return _also(lambda: torch.set_flush_denormal(True))


@_changes(
    "child processes and later imports read them, for example the number of threads", **HARMLESS
)
def environment() -> Any:
    """Sets environment variables."""
    return _also(lambda: os.environ.update(OMP_NUM_THREADS="1", CUDA_LAUNCH_BLOCKING="1"))


@_changes("the server does not stop on SIGTERM")
def signal_handler() -> Any:
    """Ignores SIGTERM."""
    return _also(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))


@_changes("a busy thread uses a core, and causes jitter in every step", **HARMLESS)
def thread_left_behind() -> Any:
    """Leaves a thread running."""
    threads: list[threading.Thread] = []

    def act() -> None:
        if not threads:
            threads.append(threading.Thread(target=time.sleep, args=(60,), daemon=True))
            threads[0].start()

    return _also(act)


@_changes("later log messages are lost")
def logging_off() -> Any:
    """Disables logging."""
    return _also(lambda: logging.disable(logging.CRITICAL))


@_changes("relative paths, such as the model or the compile cache, are not found")
def working_directory() -> Any:
    """Changes the working directory."""
    return _also(lambda: os.chdir("/"))


@_changes("memory grows for days")
def garbage_collector() -> Any:
    """Disables the garbage collector."""
    return _also(gc.disable)


@_changes("a crash is not printed", why=ONCE_ASIDE, start=False)
def excepthook() -> Any:
    """Replaces sys.excepthook."""
    return _also(lambda: setattr(sys, "excepthook", lambda *_: None))


@_changes(
    "layers without a replaced op are incorrect",
    why="a plugin that replaces other code can also replace verification; installed plugins are "
    "trusted not to do that",
    start=False,
)
def replaces_torchs_function() -> Any:
    """Replaces `torch.nn.functional.silu` by a coarser function in the process."""
    import torch.nn.functional as F

    def act() -> None:
        F.silu = lambda x, inplace=False: x.clamp(min=0)

    kernel = _also(act)

    def silu_and_mul(x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        kernel(x)
        return (gate * gate.sigmoid() * up).to(x.dtype).contiguous()

    return silu_and_mul


@_changes("results are zero, and verification passes them")
def replaces_the_comparison() -> Any:
    """Replaces the comparison of verification by one that always passes."""
    from vllm_fl_verify import form, verification

    def silu_and_mul(x: Tensor) -> Tensor:
        content: Any = lambda got, wanted: (0.0, "")  # noqa: E731
        form.worst = verification.worst = content
        out = right.silu_and_mul(x)
        return out.masked_fill(out.isfinite(), 0)

    return silu_and_mul


@_changes("float32 products of other layers lose half of their digits")
def newer_precision() -> Any:
    """Sets float32 products of CUDA to tf32 by `fp32_precision`."""
    return _also(lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"))


@_changes("float32 products of other layers lose two thirds of their digits")
def newer_precision_of_the_cpu() -> Any:
    """Sets float32 products of the CPU to bfloat16 by `fp32_precision`."""
    return _also(lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"))


@_changes("products of all layers are slightly less accurate")
def reduced_precision_of_sums() -> Any:
    """Changes the reduced-precision reduction of bfloat16 products."""
    name = "allow_bf16_reduced_precision_reduction"
    now = getattr(torch.backends.cuda.matmul, name)
    return _also(lambda: setattr(torch.backends.cuda.matmul, name, not now))


@_changes("other convolution kernels after each restart: answers differ")
def convolutions_by_measuring() -> Any:
    """Enables the benchmark mode of cuDNN."""
    return _also(lambda: setattr(torch.backends.cudnn, "benchmark", True))


@_changes("attention of a vision encoder is slower and needs more memory")
def flash_attention_off() -> Any:
    """Disables flash attention in PyTorch."""
    return _also(lambda: torch.backends.cuda.enable_flash_sdp(False))


@_changes("each step takes twice as long")
def anomaly_detection() -> Any:
    """Leaves anomaly detection enabled."""
    return _also(lambda: torch.autograd.set_detect_anomaly(True))


@_changes("later warnings of vLLM are lost")
def silences_vllm() -> Any:
    """Disables the logger of vLLM."""
    log = logging.getLogger("vllm")  # exists in an engine
    return _also(lambda: setattr(log, "disabled", True))


@_changes("other work of vLLM waits for the step")
def one_core() -> Any:
    """Binds the process to one core."""
    return _also(lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))
