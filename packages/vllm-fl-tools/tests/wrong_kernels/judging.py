"""Judge wrong kernels: one function for each column of the table in docs/wrong-kernels.

Verdicts are computed in child processes, because a kernel may end, hang or damage its process.
Harmless kernels of an op share a child, which computes inputs and reference results once.
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

shared_in: Path | None = None
"""Folder of verdicts that the workers of pytest-xdist share."""

FAMILIES = MappingProxyType({SILU: "qwen3", NORM: "qwen3", ROTARY: "qwen3", GELU: "gemma3"})
"""Op -> family of the tiny model whose engine calls it."""


@cache
def at_start(name: str) -> Verdict:
    """Return the verdict of verification at startup on the kernel `name`."""
    return _group(_key(kernels()[name]))[name]


def at_start_without(check: str, name: str) -> Verdict:
    """Return the verdict of verification at startup without one of its checks."""
    return _in_a_child(start_verdicts, [name], (check,))[name]


def right_at_start(like: str) -> Verdict:
    """Return the verdict on a correct kernel that is verified together with `like`."""
    return _group(_key(kernels()[like]))["right"]


def by_kit(name: str, *checks: str) -> Verdict:
    """Return the verdict of the conformance kit on the kernel `name`: the first failing check.

    Args:
        name: name of the kernel.
        checks: checks to run; by default all that need no installed backend.
    """
    return _in_a_child(kit_verdict, [name], checks)[name]


def right_by_kit(like: str, *checks: str) -> Verdict:
    """Return the verdict of these checks of the kit on a correct kernel of the op of `like`."""
    return _in_a_child(right_kit_verdict, [like], checks)[like]


@cache
def in_a_graph(name: str) -> Verdict:
    """Return the verdict of verification at startup on `name` in a captured graph only."""
    return _in_a_child(graph_verdict, [name])[name]


def is_captured(wrong: Wrong) -> bool:
    """Whether `in_a_graph` applies to a kernel.

    Kernels made from an oracle read on the host, with or without a fault, and cannot be captured.
    Kernels that startup disables are never captured.
    """
    return wrong.op in FAMILIES and not wrong.start and wrong.kind not in WITHOUT_ENGINES


def in_engines(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Verdict]]]:
    """Yield the verdicts on these kernels in engines of vLLM, by column.

    Only kernels that startup does not disable, of ops that the models of the engines have. The
    engines are eager: kernels that are incorrect only when compiled or captured are skipped.

    Raises:
        RuntimeError: the control fails: vLLM's implementations are judged to be wrong.
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
                    raise RuntimeError(f"the control is judged wrong: {verdicts['served']}")


def serves(wrong: Wrong) -> bool:
    """Whether `in_engines` applies to a kernel. One that startup disables is never served."""
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
    return {name: Verdict(*fields) for name, fields in json.loads(file.read_text()).items()}


@cache
def _processes() -> Any:
    """Fork children from a process that has imported PyTorch, but has not computed with it.

    After PyTorch has started threads, forked children would wait for these threads forever.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.verdict"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # read by the fork server
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
    """Run `judge` in a child process; if that hangs or dies, each kernel has that verdict."""
    limit = kernels()[names[0]].deadline
    answer = serving.in_a_child(
        _in_silence, judge, names, checks, seconds=limit, context=_processes()
    )
    return answer if isinstance(answer, dict) else dict.fromkeys(names, Verdict(*answer))


def _in_silence(
    judge: Callable[..., dict[str, Verdict]], names: list[str], checks: tuple[str, ...]
) -> dict[str, Verdict]:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.environ[breadcrumb.FOLDER] = ""
    return judge(names, checks)
