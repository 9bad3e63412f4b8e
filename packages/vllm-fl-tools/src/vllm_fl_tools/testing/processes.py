"""Checks in child processes, since vLLM's workers are child processes."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

from vllm_fl.contracts import ModelSizes
from vllm_fl.plugins.breadcrumb import FOLDER
from vllm_fl.plugins.types import LINEAR_OPS, OpImpl
from vllm_fl.text import quote

from .subject import HIDE_FRAMES, Refused, Subject, expect

__tracebackhide__ = HIDE_FRAMES

THREADS = (
    ". A forked process has none of its parent's threads, and a kernel that waits for its thread "
    "pool hangs: recreate the pool in the child (pthread_atfork, os.register_at_fork)"
)

Answers = dict[str, str]
"""`op, dtype, sample` -> the digest of the result, for each supported sample."""


def installed(backend: str) -> tuple[OpImpl, ...]:
    """Return an installed backend's implementations of ops with a contract.

    Raises:
        LookupError: no plugin provides the backend, or only for ops without a contract; the message
            lists the installed backends, or has the backend's error.
    """
    from vllm_fl.dispatch import get_default_manager

    manager = get_default_manager()
    snapshot = manager.registry.snapshot()
    known = snapshot.impls_by_op
    found = tuple(
        impl
        for op in snapshot.contracts
        for impl in known.get(op, ())
        if isinstance(impl, OpImpl) and impl.impl_id == backend
    )
    if found:
        return found
    for plugin in manager.registry.plugins:
        if plugin.error is not None and plugin.may_bring(backend):
            raise LookupError(f"Backend {backend!r} did not load. {plugin.error}")
    others = sorted(
        op for op, impls in known.items() if any(impl.impl_id == backend for impl in impls)
    )
    if {*LINEAR_OPS}.intersection(others):
        return ()  # the kit verifies its classes
    if others:
        raise LookupError(
            f"Backend {backend!r} provides only {', '.join(others)}, which have no contract, so "
            "they cannot be tested. `vllm-fl plan` lists the ops with contracts."
        )
    ids = sorted({impl.impl_id for impls in known.values() for impl in impls})
    raise LookupError(
        f"No installed plugin provides the backend {backend!r}. Install it first (pip install "
        f"-e .). Installed: {', '.join(ids) or 'none'}."
    )


def installed_with(impl: OpImpl) -> tuple[OpImpl, ...]:
    """Return the implementations of the installed backend that provides this implementation.

    Raises:
        Refused: no installed backend provides it.
    """
    try:
        found = installed(impl.impl_id)
    except LookupError as error:
        raise Refused(str(error)) from error
    if impl.op_name not in {each.op_name for each in found}:
        raise Refused(f"the installed {impl.impl_id} does not provide this op")
    return found


def fork(subject: Subject, dtype: str, sample: str) -> None:
    """A forked child gives identical bits."""
    if subject.device.type != "cpu":
        raise Refused(f"a process that used {subject.device.type} cannot use it in a fork")
    _compare("fork", subject, dtype, _run("fork", _answers, (subject, dtype), subject.deadline))


def spawn(subject: Subject, dtype: str, sample: str) -> None:
    """A new process that loads the installed backend gives identical bits."""
    found = installed_with(subject.impl)
    place = (subject.impl.impl_id, str(subject.device), subject.sizes, subject.left_out, dtype)
    there = _spawned(place, subject.deadline * len(found))
    mine = there if isinstance(there, str) else there[subject.impl.op_name]
    _compare("spawn", subject, dtype, mine)


@cache
def _spawned(place: tuple[Any, ...], deadline: float) -> dict[str, Answers | str] | str:
    """Return op -> answers of one new process for all ops, or how the op failed there.

    All ops of a dtype share a process, because it takes seconds to start. If it ended early, return
    the reason.
    """
    return _run("spawn", _answer_installed, place, deadline)


def _compare(method: str, subject: Subject, dtype: str, there: Answers | str) -> None:
    if isinstance(there, str):
        raise AssertionError(f"a child process ({method}) {there}")
    with _one_thread():  # as in the child
        here = _answers(subject, dtype)
    other = [name for name in here if here[name] != there.get(name)]
    expect(not other, f"a child process ({method}) gives different bits for: {'; '.join(other)}")


def _run(
    method: Literal["fork", "spawn"],
    target: Callable[..., dict[str, Any]],
    args: tuple[Any, ...],
    deadline: float,
) -> dict[str, Any] | str:
    """Return the result of `target` in a child process, or how the process ended."""
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, target, args), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns about every fork with threads, and torch has threads. vLLM forks its
        # workers nevertheless, and this check exists to find children that hang.
        warnings.filterwarnings("ignore", ".* is multi-threaded, use of fork", DeprecationWarning)
        child.start()
    theirs.close()
    try:
        if not ours.poll(deadline):
            return f"did not answer within {deadline:.0f} s{THREADS if method == 'fork' else ''}"
        answer: dict[str, Any] | str = ours.recv()
        return answer
    except EOFError:
        child.join()
        return f"died with exit status {child.exitcode}"
    finally:
        child.kill()
        child.join()
        ours.close()


def _child(out: Connection, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.environ[FOLDER] = ""
    torch.set_num_threads(1)  # as in vLLM's workers; a fork cannot use its parent's threads
    try:
        out.send(target(*args))
    except Exception as error:
        out.send(f"raised {quote(error)}")


def _answer_installed(
    backend: str, device: str, sizes: ModelSizes, left_out: Any, dtype: str
) -> dict[str, Answers | str]:
    answers: dict[str, Answers | str] = {}
    for impl in installed(backend):
        if impl.availability() is not True:  # a build may have kernels of only some ops
            answers[impl.op_name] = "reports it as not available"
            continue
        try:
            subject = Subject(impl, torch.device(device), sizes, left_out)
            answers[impl.op_name] = _answers(subject, dtype)
        except Exception as error:  # affects only this op: continue with the others
            answers[impl.op_name] = f"raised {quote(error)}"
    return answers


def _answers(subject: Subject, dtype: str) -> Answers:
    samples = subject.patterns(dtype) if dtype in subject.spec.dtypes else ()
    return {
        f"{subject.impl.op_name}, {dtype}, {sample.name}": subject.bits(sample)
        for sample in samples
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
