"""What sees a wrong kernel: one function for each column of the table in docs/wrong-kernels.

Each verdict is reached in a child process of its own: a kernel may end it, hang it, or leave it
damaged. Kernels that harm nobody share one, so that what is made for all of an op is made once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import MappingProxyType
from typing import Any

from envs import locked
from vllm_fl.plugins import breadcrumb

from . import serving
from .chosen import chosen
from .corpus import GELU, NORM, ROTARY, SILU, SIZES, WITHOUT_ENGINES, Wrong, kernels
from .verdict import Verdict, graph_verdict, kit_verdict, right_kit_verdict, start_verdicts

__all__ = [
    "at_start",
    "at_start_without",
    "by_kit",
    "in_a_graph",
    "in_engines",
    "is_captured",
    "right_at_start",
    "right_by_kit",
]

shared_in: Path | None = None
"""A folder in which the workers of pytest-xdist find what another one has judged."""

FAMILIES = MappingProxyType({SILU: "qwen3", NORM: "qwen3", ROTARY: "qwen3", GELU: "gemma3"})
"""Op -> the family of tiny models in which an engine serves it."""


@cache
def at_start(name: str) -> Verdict:
    """What verification at start makes of the kernel `name`."""
    return _group(_key(kernels()[name]))[name]


def at_start_without(check: str, name: str) -> Verdict:
    """What it makes of the kernel without one of its checks."""
    return _in_a_child(start_verdicts, [name], (check,))[name]


def right_at_start(like: str) -> Verdict:
    """What it makes of a kernel without a fault, beside the kernel `like`."""
    return _group(_key(kernels()[like]))["right"]


def by_kit(name: str, *checks: str) -> Verdict:
    """What the conformance kit makes of the kernel `name`: the first check that fails.

    Args:
        name: the kernel's.
        checks: those to run; all that run without an installed backend, where there are none.
    """
    return _in_a_child(kit_verdict, [name], checks)[name]


def right_by_kit(like: str, *checks: str) -> Verdict:
    """What these checks of the kit make of a kernel without a fault, of the op of `like`."""
    return _in_a_child(right_kit_verdict, [like], checks)[like]


@cache
def in_a_graph(name: str) -> Verdict:
    """What verification at start makes of the kernel `name` in a captured graph alone."""
    return _in_a_child(graph_verdict, [name])[name]


def is_captured(wrong: Wrong) -> bool:
    """Whether `in_a_graph` shows anything of a kernel. What is made of an oracle reads on the host,
    with a fault or without: no graph can hold it. One that start takes out is captured nowhere."""
    return wrong.op in FAMILIES and not wrong.start and wrong.kind not in WITHOUT_ENGINES


def in_engines(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Verdict]]]:
    """What becomes of these kernels in engines of vLLM, by column: those that start does not take
    out, of ops that the engines' models have. The engines are eager: kernels that are wrong only
    when compiled or captured are left out.

    Raises:
        RuntimeError: the control fails: vLLM's own forms pass for wrong ones.
    """
    here = [kernels()[name] for name in names if serves(kernels()[name])]
    for family in sorted(set(FAMILIES.values())):
        chosen = [wrong.name for wrong in here if FAMILIES[wrong.op] == family]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model, out = _model(Path(folder), family), Path(folder) / "out"
            names = (serving.CONTROL, *chosen)
            command = [sys.executable, "-m", serving.__name__, model, str(out), *names]
            path = os.pathsep.join(sys.path)
            environment = {**os.environ, **serving.variables(), "PYTHONPATH": path}
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            for line in out.read_text().splitlines():
                said = json.loads(line)
                name, verdicts = said.pop("name"), {c: Verdict(*v) for c, v in said.items()}
                if name != serving.CONTROL:
                    yield name, verdicts
                elif verdicts["served"].outcome != "right":
                    raise RuntimeError(f"right kernels pass for wrong ones: {verdicts['served']}")


def serves(wrong: Wrong) -> bool:
    """Whether the engines of `in_engines` show anything of a kernel. One that start takes out
    serves in none."""
    is_here = (
        wrong.op in FAMILIES
        and wrong.mode == "eager"
        and wrong.kind not in ("graph", *WITHOUT_ENGINES)
    )
    return is_here and not wrong.start


def _model(folder: Path, family: str) -> str:
    import tiny_model

    sizes = {
        "hidden_size": SIZES.hidden,
        "intermediate_size": SIZES.intermediate,
        "num_attention_heads": SIZES.heads,
        "num_key_value_heads": SIZES.kv_heads,
        "head_dim": SIZES.head_size,
        "max_position_embeddings": SIZES.max_position,
    }
    own = {"query_pre_attn_scalar": SIZES.head_size} if family == "gemma3" else {}
    return str(tiny_model.make(folder, family, **sizes, **own))


def _key(wrong: Wrong) -> tuple[Any, ...]:
    alone = wrong.name if wrong.apart else wrong.kind in ("sizes", *WITHOUT_ENGINES) and wrong.kind
    what = wrong.name in chosen(), wrong.op, wrong.mode, wrong.sizes, wrong.dtype
    return *what, *wrong.environ.items(), alone


@cache
def _group(key: tuple[Any, ...]) -> dict[str, Verdict]:
    names = [name for name, wrong in kernels().items() if _key(wrong) == key]
    if shared_in is None:
        return _in_a_child(start_verdicts, names)
    file = shared_in / f"{names[0]}.json"
    with locked(file):
        if not file.exists():
            file.write_text(json.dumps(_in_a_child(start_verdicts, names)))
    return {name: Verdict(*told) for name, told in json.loads(file.read_text()).items()}


@cache
def _processes() -> Any:
    """Children are forked from a process that has PyTorch, and has computed nothing with it yet.

    One that has used PyTorch's threads cannot be forked: its children would wait for them for ever.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.verdict"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # where that process finds this package
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _in_a_child(
    judge: Callable[..., dict[str, Verdict]], names: Sequence[str], checks: tuple[str, ...] = ()
) -> dict[str, Verdict]:
    """What `judge` gives in a child process, or what became of that process."""
    first = kernels()[names[0]]
    ours, theirs = _processes().Pipe(duplex=False)
    child = _processes().Process(target=_child, args=(theirs, judge, names, checks))
    child.start()
    theirs.close()
    try:
        if not ours.poll(first.deadline):
            verdict = Verdict("hangs", f"no verdict within {first.deadline:.0f} s")
        else:
            answer: dict[str, Verdict] | Verdict = ours.recv()
            if isinstance(answer, dict):
                return answer
            verdict = answer
    except EOFError:
        child.join()
        verdict = Verdict("dies", f"the process ended with status {child.exitcode}")
    finally:
        child.kill()
        child.join()
        ours.close()
    return dict.fromkeys(names, verdict)


def _child(
    out: Any, judge: Callable[..., dict[str, Verdict]], names: list[str], checks: tuple[str, ...]
) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.environ[breadcrumb.FOLDER] = ""
    try:
        answer: Any = judge(names, checks)
    except BaseException as error:
        answer = Verdict("ends", _text(error))
    out.send(answer)
    out.close()
    os._exit(0)  # what a kernel left running is not waited for


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which cannot be printed"
