"""Delete each statement of a backend's operators, one at a time: the conformance kit must notice.

    python tools/deletions.py packages/vllm-fl-reference

Runs the class of the distribution's tests/test_conformance.py, with its exceptions, on the backend
as it is installed, once for every statement in the functions of its `impl` modules. Each time the
statement is replaced by `pass`, in a forked child in which the backend is imported anew: a child
that dies or hangs has noticed, too. Prints killed and total, and exits with 1 when

- fewer than 95 % are noticed, or
- tests/survivors.toml does not list exactly those that are not, each with its reason.

What the kit cannot judge is not counted: modules without an implementation of an op that can run
here, and the functions that tests/survivors.toml names under [[elsewhere]]. There the pytest
arguments in `tests` are run instead, and hold to the same. What is listed of modules left out is
not checked, and named. While you mend one module, `--only FILE` judges it alone.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["ENOUGH", "Deletion", "Listed", "deletions", "problems", "read_listed"]

ENOUGH = 0.95
"""The share that must be noticed."""

PATIENCE = 900.0
"""Seconds for the checks of one module with nothing deleted."""

HANGS, AT_LEAST = 3.0, 60.0
"""A child without a statement has hung after so many times what the module takes whole, and not
before so many seconds."""


@dataclass(frozen=True)
class Deletion:
    """One statement to leave out.

    Args:
        file: the module's file name.
        function: its qualified name; inner functions count to the outermost one or their class.
        statement: its first line; with ` #2` and so on where the function has the same again.
        line: where it stands.
    """

    file: str
    function: str
    statement: str
    line: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What survivors.toml names it by: no line number, which any edit would move."""
        return self.file, self.function, self.statement

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.function}: {self.statement}"


@dataclass(frozen=True)
class Listed:
    """What survivors.toml says."""

    survivors: Mapping[tuple[str, str, str], str]
    elsewhere: Mapping[tuple[str, str], tuple[str, ...]]


def read_listed(path: Path) -> Listed:
    """`[[survivor]]` with file, function, statement and reason, and `[[elsewhere]]` with file,
    function, reason and tests (arguments for pytest, run in the distribution's folder).

    Raises:
        ValueError: another key, or one that is missing or empty, or an entry twice.
    """
    content = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    kinds = {
        "survivor": ("file", "function", "statement", "reason"),
        "elsewhere": ("file", "function", "reason", "tests"),
    }
    if unknown := set(content) - set(kinds):
        raise ValueError(f"{path}: expected {' or '.join(kinds)}, got {', '.join(unknown)}")
    survivors: dict[tuple[str, str, str], str] = {}
    elsewhere: dict[tuple[str, str], tuple[str, ...]] = {}
    for kind, keys in kinds.items():
        for entry in content.get(kind, []):
            if set(entry) != set(keys) or not all(entry.values()):
                raise ValueError(f"{path}: {kind} needs {', '.join(keys)}, got {entry}")
            place = (entry["file"], entry["function"])
            if kind == "elsewhere":
                twice = place in elsewhere
                elsewhere[place] = tuple(entry["tests"])
            else:
                twice = (*place, entry["statement"]) in survivors
                survivors[*place, entry["statement"]] = entry["reason"]
            if twice:
                raise ValueError(f"{path}: twice: {entry}")
    return Listed(survivors, elsewhere)


def deletions(source: str, file: str) -> Iterator[tuple[Deletion, ast.Module]]:
    """Every statement in the functions of a module, and the module without it."""
    seen: dict[tuple[str, str], int] = {}
    for number, (function, node) in enumerate(_statements(ast.parse(source))):
        text = ast.unparse(node).splitlines()[0]
        seen[function, text] = count = seen.get((function, text), 0) + 1
        name = text if count == 1 else f"{text} #{count}"
        changed = ast.parse(source)
        for other, (_, same) in enumerate(_statements(changed)):
            if other == number:
                _replace(changed, same)
                break
        yield Deletion(file, function, name, node.lineno), ast.fix_missing_locations(changed)


def _statements(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """(function, statement) of all functions, the outer statements before the inner ones."""
    for node in tree.body:
        methods = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in methods:
            if isinstance(function, ast.FunctionDef):
                within = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                name = within + function.name
                for inner in ast.walk(function):
                    if isinstance(inner, ast.stmt) and inner is not function and _does(inner):
                        yield name, inner


def _does(node: ast.stmt) -> bool:
    """Whether it is more than a docstring, a bare annotation or a `pass`."""
    documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    annotates = isinstance(node, ast.AnnAssign) and node.value is None
    return not documents and not annotates and not isinstance(node, ast.Pass)


def _replace(tree: ast.Module, old: ast.stmt) -> None:
    for parent in ast.walk(tree):
        for _, body in ast.iter_fields(parent):
            if isinstance(body, list) and any(item is old for item in body):
                body[body.index(old)] = ast.copy_location(ast.Pass(), old)
                return
    raise AssertionError("the statement is not in its tree")


def problems(
    outcomes: Mapping[Deletion, bool],
    listed: Mapping[tuple[str, str, str], str],
    enough: float,
    left_out: Collection[str] = (),
) -> list[str]:
    """What is wrong with a run.

    Args:
        outcomes: deletion -> whether it was noticed.
        listed: the known survivors, with reasons.
        enough: the share that must be noticed.
        left_out: files of which nothing was deleted; what is listed of them may be right.
    """
    survived = {deletion.key: deletion for deletion, killed in outcomes.items() if not killed}
    known = {deletion.key for deletion in outcomes}
    found = [
        f"survives, and is not listed: {d}" for key, d in survived.items() if key not in listed
    ]
    for key in listed:
        what = ": ".join(key)
        if key[0] in left_out:
            continue
        if key not in known:
            found.append(f"listed, but there is no such statement: {what}")
        elif key not in survived:
            found.append(f"listed, but it does not survive: {what}")
    killed = sum(outcomes.values())
    if killed < enough * len(outcomes):
        found.append(f"{killed} of {len(outcomes)} noticed; at least {enough:.0%} must be")
    return found


class Backend:
    """An installed backend and its conformance class; imported anew for each mutant.

    Attributes:
        modules: name -> file of those that implement ops that can run here, and of their package.
        away: the ops that cannot run here, such as a vendor's without its hardware.
        left_out: name -> file of the modules of those alone, or that nobody asked for.

    Args:
        folder: the distribution.
        only: the files' names to judge; all where there are none.

    Raises:
        ValueError: there is no such file, or no op of it can run here.
    """

    def __init__(self, folder: Path, only: Collection[str] = ()) -> None:
        from vllm_fl.testing import OpConformance

        self.folder = folder
        self.tests = folder / "tests"
        spec = spec_from_file_location("test_conformance", self.tests / "test_conformance.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        (self.cls,) = (
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, OpConformance)
            and value is not OpConformance
        )
        from vllm_fl_tools.testing.processes import installed

        impls = installed(self.cls.backend)
        self.away = frozenset(i.op_name for i in impls if i.availability() is not True)
        here = {i.fn.__module__ for i in impls if i.op_name not in self.away}
        self.modules = _files(here | {name.rpartition(".")[0] for name in here})
        self.left_out = _files({i.fn.__module__ for i in impls} - here)
        if unknown := set(only) - {path.name for path in self.modules.values()}:
            names = ", ".join(sorted(path.name for path in self.modules.values())) or "none"
            raise ValueError(f"no op of {', '.join(sorted(unknown))} can run here; of {names} can")
        if not self.modules:
            raise ValueError(f"no op of {self.cls.backend} can run here")
        asked = {n: path for n, path in self.modules.items() if not only or path.name in only}
        self.left_out |= {n: path for n, path in self.modules.items() if n not in asked}
        self.modules = asked

    def package(self) -> str:
        """The import name of the whole distribution."""
        return next(iter(self.modules)).partition(".")[0]

    def first_failure(self, module: str | None = None) -> str | None:
        """Run the kit: what fails first, or None. With `module`, its own ops come first."""
        from vllm_fl.testing import CHECKS
        from vllm_fl_tools.testing.subject import Refused
        from vllm_fl_tools.testing.suite import _Suite

        suite = _Suite(self.cls)
        for subject in suite.subjects.values():
            verdict = subject.impl.availability()
            if verdict is not True and subject.impl.op_name not in self.away:
                return f"{subject.impl.op_name} is not available: {verdict}"
        own = {s.impl.op_name for s in suite.subjects.values() if s.impl.fn.__module__ == module}
        cases = [case for check in CHECKS for case in suite.cases[check]]
        for case in sorted(cases, key=lambda case: case.op not in own):
            if case.check in ("spawn", "engine") or any(x.matches(case) for x in suite.xfails):
                continue  # a fresh process would import the backend as it is installed
            if case.op in self.away:
                continue
            if own and case.op not in own:
                break  # a module's statements reach its own ops only
            try:
                CHECKS[case.check].function(suite.subjects[case.op], case.dtype, case.sample)
            except Refused:
                continue
            except (Exception, SystemExit) as error:
                return f"{case.check} {case}: {type(error).__name__}: {error}"
        return None

    def forget(self) -> None:
        """Let the next use import the backend again."""
        from vllm_fl.dispatch import reset_default_manager

        package = self.package()
        for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
            del sys.modules[name]
        reset_default_manager()


def _files(names: Collection[str]) -> dict[str, Path]:
    return {name: Path(str(sys.modules[name].__file__)) for name in sorted(names)}


class _Edited(MetaPathFinder, Loader):
    """Finds one module with a source of our own, and no other."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self.name, self.path, self.tree = name, path, tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        package = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        return spec_from_file_location(
            name, self.path, loader=self, submodule_search_locations=package
        )

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def _judge(
    backend: Backend, name: str, path: Path, tree: ast.Module, tests: Sequence[str]
) -> str | None:
    """In a child: the backend without the statement. What noticed it, or None."""
    backend.forget()
    sys.meta_path.insert(0, _Edited(name, path, tree))
    if not tests:
        return backend.first_failure(name)
    import pytest

    os.chdir(backend.folder)
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", *tests])
    return None if status == 0 else f"pytest: {status!r}"


def _forked(
    jobs: Sequence[tuple[Callable[[], str | None], float]],
) -> Iterator[tuple[int, str | None, float]]:
    """(which job, what it gives, its seconds), as they end: in forked children, two at a time.

    Args:
        jobs: each with the seconds that it may take.
    """
    from multiprocessing import get_context
    from multiprocessing.connection import Connection, wait

    from vllm_fl.plugins import breadcrumb

    context = get_context("fork")
    running: dict[Connection, tuple[int, Any, float]] = {}  # which, where, since when
    waiting = list(enumerate(jobs))

    def run(job: Callable[[], str | None], out: Connection) -> None:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.setsid()  # a grandchild that hangs ends with it
        breadcrumb.keep_in(sink)  # no later start of this user's is told of what ends here
        try:
            out.send(job())
        except BaseException as error:
            out.send(f"{type(error).__name__}: {error}")

    try:
        while waiting or running:
            while waiting and len(running) < 2:
                number, (job, _) = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                child = context.Process(target=run, args=(job, theirs))
                child.start()
                theirs.close()
                running[ours] = (number, child, time.monotonic())
            soonest = min(since + jobs[number][1] for number, _, since in running.values())
            ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
            for pipe, (number, child, since) in list(running.items()):
                seconds, patience = time.monotonic() - since, jobs[number][1]
                if pipe in ready:
                    try:
                        answer = pipe.recv()
                    except EOFError:
                        answer = "died"
                elif seconds >= patience:
                    answer = f"no answer within {patience:.0f} s"
                else:
                    continue
                _end(child)
                pipe.close()
                del running[pipe]
                yield number, answer, seconds
    finally:
        for _, child, _ in running.values():
            _end(child)


def _end(child: Any) -> None:
    import signal

    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        child.kill()
    child.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one distribution's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the distribution")
    parser.add_argument("--only", nargs="+", default=(), metavar="FILE", help="of `impl` alone")
    parser.add_argument("--verbose", action="store_true", help="say what noticed each deletion")
    arguments = parser.parse_args(argv)

    import torch

    torch.set_num_threads(1)  # a fork cannot use its parent's threads
    try:
        backend = Backend(arguments.folder.resolve(), arguments.only)
    except ValueError as error:
        parser.error(str(error))
    failure = backend.first_failure(list(backend.modules)[-1])  # imports what every child needs
    if failure:
        print(f"The backend as it is fails its kit: {failure}")
        return 1
    if backend.left_out:
        print(f"Left out (not asked for, or unable to run here): {', '.join(backend.left_out)}")
    left_out = {path.name for path in backend.left_out.values()}
    listed = read_listed(backend.tests / "survivors.toml")
    for place in (*listed.survivors, *listed.elsewhere):
        if place[0] in left_out:
            print(f"listed, and not checked here: {': '.join(place)}")
    found = [
        (deletion, name, path, tree, listed.elsewhere.get((deletion.file, deletion.function), ()))
        for name, path in backend.modules.items()
        for deletion, tree in deletions(path.read_text("utf-8"), path.name)
    ]
    start = time.monotonic()
    sources = {name: (path, ast.parse(path.read_text("utf-8"))) for _, name, path, *_ in found}
    whole = list(dict.fromkeys((name, tuple(tests)) for _, name, _, _, tests in found))
    untouched = [
        (functools.partial(_judge, backend, name, *sources[name], tests), PATIENCE)
        for name, tests in whole
    ]
    takes: dict[tuple[str, tuple[str, ...]], float] = {}
    for number, failure, seconds in _forked(untouched):
        takes[whole[number]] = seconds
        if failure:  # imported anew, which would count as noticing every deletion
            name, tests = whole[number]
            print(
                f"{name} fails with nothing deleted, {' '.join(tests) or 'by the kit'}: {failure}"
            )
            return 1
    for (name, tests), seconds in takes.items():
        print(f"{' '.join((name, *tests))}: {seconds:.0f} s with nothing deleted")
    print(f"{len(found)} statements; {time.monotonic() - start:.0f} s", flush=True)
    edited = [
        (
            functools.partial(_judge, backend, name, path, tree, tests),
            max(AT_LEAST, HANGS * takes[name, tests]),
        )
        for _, name, path, tree, tests in found
    ]
    by_kit: dict[Deletion, bool] = {}
    by_tests: dict[Deletion, bool] = {}
    for done, (number, what, _) in enumerate(_forked(edited), start=1):
        deletion, *_, tests = found[number]
        (by_tests if tests else by_kit)[deletion] = what is not None
        if arguments.verbose or what is None:
            noticed = " ".join((what or "SURVIVES").split())[:200]
            print(f"{done}/{len(found)} {deletion}\n    {noticed}", flush=True)
        elif done % 50 == 0:
            print(f"{done}/{len(found)}; {time.monotonic() - start:.0f} s", flush=True)
    wrong = problems({**by_kit, **by_tests}, listed.survivors, 0.0, left_out)
    wrong += problems(by_kit, {d.key: "" for d, k in by_kit.items() if not k}, ENOUGH)
    for function in listed.elsewhere:
        if function[0] in left_out:
            continue
        if function not in {(d.file, d.function) for d in by_tests}:
            wrong.append(f"[[elsewhere]] names no function: {': '.join(function)}")
    for line in wrong:
        print(line)
    print(
        f"{backend.cls.backend}: of {len(by_kit)} statements the kit misses "
        f"{len(by_kit) - sum(by_kit.values())}: {sum(by_kit.values())} killed "
        f"({sum(by_kit.values()) / max(1, len(by_kit)):.1%}); the distribution's own tests killed "
        f"{sum(by_tests.values())} of {len(by_tests)}; {time.monotonic() - start:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
