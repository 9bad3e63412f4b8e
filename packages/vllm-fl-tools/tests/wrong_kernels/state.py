"""Wrong in what it leaves changed in the process. The numbers are right."""

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

ONCE_ASIDE = "the state of a process that is not PyTorch's own, nor listed, is not compared"


def _also(act: Callable[[], object]) -> Any:
    """The right kernel that also does something to the process."""

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
    "sampling and new buffers are fp64: slow, or an error of another dtype",
)
def default_dtype() -> Any:
    return _also(lambda: torch.set_default_dtype(torch.float64))


@_changes(
    "leaves another default device",
    "what vLLM allocates next has no memory: an error far away",
)
def default_device() -> Any:
    return _also(lambda: torch.set_default_device("meta"))


@_changes("leaves PyTorch with three threads", "slower, or over-committed, cores")
def number_of_threads() -> Any:
    return _also(lambda: torch.set_num_threads(3))


@_changes(
    "seeds PyTorch's global generator",
    "samples at temperature 1 are the same for every request and every start",
)
def seeds_the_generator() -> Any:
    return _also(lambda: torch.manual_seed(0))


@_changes(
    "seeds Python's random module",
    "request ids, back-off times and ports collide",
    why="honest libraries do it, too, where they are first used: it takes nobody out",
    start=False,
)
def seeds_python() -> Any:
    return _also(lambda: random.seed(0))


@_changes(
    "leaves grad mode off",
    "adapters that are trained in the process learn nothing",
    why="inference mode, in which start looks and vLLM serves, puts it back",
    start=False,
)
def grad_mode() -> Any:
    return _also(lambda: torch.set_grad_enabled(False))


@_changes(
    "leaves autocast on",
    "every matrix product after it is computed in another dtype",
)
def autocast() -> Any:
    return _also(lambda: torch.set_autocast_enabled("cpu", True))


@_changes(
    "leaves deterministic algorithms on",
    "operators without one raise; others are slow",
)
def deterministic_algorithms() -> Any:
    return _also(lambda: torch.use_deterministic_algorithms(True))


@_changes(
    "leaves float32 products at medium precision",
    "fp32 layers (routers, norms of the head) lose 16 bits",
)
def matmul_precision() -> Any:
    return _also(lambda: torch.set_float32_matmul_precision("medium"))


@_changes(
    "turns on flushing of subnormals for the thread",
    "results of everything else change in their last places",
    why="torch does not tell whether it is on",
    start=False,
)
def flushes_denormals() -> Any:
    return _also(lambda: torch.set_flush_denormal(True))


@_changes(
    "sets an environment variable",
    "children and later imports read it: another backend, another number of threads",
    why="honest libraries do it, too, where they are first used: it takes nobody out",
    start=False,
)
def environment() -> Any:
    return _also(lambda: os.environ.update(OMP_NUM_THREADS="1", CUDA_LAUNCH_BLOCKING="1"))


@_changes(
    "takes the signal SIGTERM for itself",
    "the server does not end when it is told to",
)
def signal_handler() -> Any:
    return _also(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))


@_changes(
    "leaves a thread running",
    "one core less, jitter in every step, if it does anything",
    why="honest libraries do it, too, where they are first used: it takes nobody out",
    start=False,
)
def thread_left_behind() -> Any:
    threads: list[threading.Thread] = []

    def act() -> None:
        if not threads:
            threads.append(threading.Thread(target=time.sleep, args=(60,), daemon=True))
            threads[0].start()

    return _also(act)


@_changes(
    "switches logging off",
    "nothing that happens afterwards is told",
)
def logging_off() -> Any:
    return _also(lambda: logging.disable(logging.CRITICAL))


@_changes(
    "changes the working directory",
    "relative paths of the model, of files, of the compile cache point elsewhere",
)
def working_directory() -> Any:
    return _also(lambda: os.chdir("/"))


@_changes(
    "switches the garbage collector off",
    "memory grows for days",
)
def garbage_collector() -> Any:
    return _also(gc.disable)


@_changes("replaces sys.excepthook", "a crash is not printed", why=ONCE_ASIDE, start=False)
def excepthook() -> Any:
    return _also(lambda: setattr(sys, "excepthook", lambda *_: None))


@_changes(
    "replaces torch.nn.functional.silu by a coarser one, for everybody",
    "layers that no plan has touched are wrong",
    why="who replaces other code replaces what would look at it, too: an installed plugin is "
    "trusted not to",
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
    "replaces the comparison by one that is always content",
    "whatever it likes",
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
    "sets the precision of products by torch's newer switch",
    "products of float32 in other layers lose half of their digits",
)
def newer_precision() -> Any:
    return _also(lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"))


@_changes(
    "lets the CPU's products of float32 be of bfloat16, by torch's newer switch",
    "products of float32 in other layers lose two thirds of their digits",
)
def newer_precision_of_the_cpu() -> Any:
    return _also(lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"))


@_changes(
    "leaves sums of bfloat16 products to be rounded on the way",
    "products of all layers are a little worse",
)
def reduced_precision_of_sums() -> Any:
    name = "allow_bf16_reduced_precision_reduction"
    now = getattr(torch.backends.cuda.matmul, name)
    return _also(lambda: setattr(torch.backends.cuda.matmul, name, not now))


@_changes(
    "leaves convolutions of cuDNN to be chosen by measuring",
    "other kernels at each start: answers that differ from day to day",
)
def convolutions_by_measuring() -> Any:
    return _also(lambda: setattr(torch.backends.cudnn, "benchmark", True))


@_changes(
    "switches flash attention off in PyTorch",
    "attention of a vision encoder takes more memory, and longer",
)
def flash_attention_off() -> Any:
    return _also(lambda: torch.backends.cuda.enable_flash_sdp(False))


@_changes("leaves anomaly detection on", "each step takes twice as long")
def anomaly_detection() -> Any:
    return _also(lambda: torch.autograd.set_detect_anomaly(True))


@_changes(
    "switches vLLM's log off",
    "no warning of vLLM is seen again",
)
def silences_vllm() -> Any:
    log = logging.getLogger("vllm")  # an engine has it
    return _also(lambda: setattr(log, "disabled", True))


@_changes(
    "keeps the process on one core",
    "all that vLLM does beside a step waits for it",
)
def one_core() -> Any:
    return _also(lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))
