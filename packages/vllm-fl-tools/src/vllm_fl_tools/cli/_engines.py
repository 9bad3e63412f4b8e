"""Engines in separate processes, for verbs."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.startup import Startup
from vllm_fl.errors import VllmFLError
from vllm_fl.plugins.breadcrumb import FOLDER, last
from vllm_fl.settings.schema import Settings
from vllm_fl.text import clean

from ._engine import option_of
from ._progress import doing
from ._show import UsageError, say

COMMAND = (sys.executable, "-P", "-m", "vllm_fl_tools.integration.workload")

START_TIMEOUT, ANSWER_TIMEOUT = 1800.0, 600.0
"""Time limits in seconds for the startup and for an answer; large models load for minutes."""

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")

SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONFAULTHANDLER": "1"}
"""Limits memory, and writes stacks to the log when a signal ends a process."""

LEFT_ALONE = {Settings.metrics.variable: ""}
"""Variables that disable a server's output files in the engines of verbs."""

EXTENSION_OPTION = "--worker-extension-cls"
"""vLLM's argument for methods that are added to workers. Some verbs set it."""

LAST_WORDS = 10.0
"""Seconds for the processes of a hanging engine to write their stacks."""

SHOWN, LONGEST = 4000, 200_000
"""Characters of a log's end in an error message, and in `EngineError.log`."""


class EngineError(VllmFLError):
    """An engine that a verb started failed, or did not answer in time.

    Attributes:
        log: the end of its log.
        hung: whether the engine did not answer in time.
        ran: the last note by one of its processes about its work, or empty.
    """

    code = "FL601"

    def __init__(self, message: str, *, log: str = "", hung: bool = False, ran: str = "") -> None:
        super().__init__(message)
        self.log, self.hung, self.ran = log, hung, ran


class EngineProcess:
    """A running engine, idle between requests.

    Args:
        name: for messages.
        process: answers on its standard output.
        log: the file of its standard error, in the folder of its notes.
        limits: time limits in seconds of its startup and of an answer.

    Raises:
        EngineError: it does not start.
        UsageError: vLLM rejects the user's arguments.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[str],
        log: Path,
        limits: tuple[float, float] = (START_TIMEOUT, ANSWER_TIMEOUT),
    ) -> None:
        self.name, self.process, self.log = name, process, log
        start_timeout, self._timeout = limits
        ready = self._answer(start_timeout, "is starting")
        if "usage" in ready:
            raise UsageError(f"vLLM rejects these arguments: {clean(ready['usage'])}")
        self.report: dict[str, Any] = ready["report"] or {}
        self.vocabulary: int = ready["vocabulary"]
        self.length: int = ready["length"]
        self.graph_tokens: int = ready["graph_tokens"]

    def ask(self, kind: str, **what: Any) -> dict[str, Any]:
        """Send a request for `integration.workload`, and wait for the answer.

        Raises:
            EngineError: the engine failed, or did not answer in time; with the end of its log.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the engine's log has the reason
            print(json.dumps({kind: what}), file=self.process.stdin, flush=True)
        return self._answer(self._timeout, "is working")

    def _answer(self, timeout: float, what: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        with (
            doing(f"the engine {self.name} {what}"),
            selectors.DefaultSelector() as selector,
        ):
            selector.register(self.process.stdout, selectors.EVENT_READ)
            hung = not selector.select(timeout)
            line = "" if hung else self.process.stdout.readline()
        if not line:
            if hung:
                _end_with_stacks(self.process)
            ran = last(self.log.parent)
            log = self.log.read_text(errors="replace")[-LONGEST:]
            raise EngineError(
                f"The engine {self.name} failed, or did not answer within {timeout:.0f} s. The end "
                f"of its log:\n{log[-SHOWN:]}",
                log=log,
                hung=hung,
                ran="" if ran is None else ran.what,
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def check_model(option: str, model: str | None, more: Sequence[str] = ()) -> str:
    """Check the model for an option of a verb, and return it.

    Raises:
        UsageError: the model is missing, or the arguments for vLLM (`more`) contain
            `EXTENSION_OPTION`.
    """
    if model is None:
        raise UsageError(f"{option} needs --model DIR, to start an engine")
    if not (Path(model) / "config.json").is_file():
        what = "has no config.json" if Path(model).is_dir() else "is not a folder"
        raise UsageError(f"--model {model}: it {what}")
    if EXTENSION_OPTION in map(option_of, more):
        raise UsageError(f"{option} sets {EXTENSION_OPTION}: remove it from the arguments")
    return model


def engine_startup() -> Startup:
    """Return the startup of an engine in this environment.

    Raises:
        UsageError: vllm-fl is switched off.
    """
    manager = get_default_manager()
    manager.ensure_initialized()
    if manager.startup is None or not manager.startup.settings.enabled:
        raise UsageError(f"{Settings.enabled.variable} is set to off, so there is no plan")
    return manager.startup


def has_weights(model: str) -> bool:
    return any(next(Path(model).glob(kind), None) for kind in WEIGHTS)


@contextlib.contextmanager
def running_engine(
    name: str,
    model: str,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    steps_aside: bool = False,
    as_served: bool = False,
    longest: int | None = None,
    arguments: Sequence[str] = (),
    limits: tuple[float, float] = (START_TIMEOUT, ANSWER_TIMEOUT),
) -> Iterator[EngineProcess]:
    """Start an engine, and kill all its processes at the end.

    Args:
        name: for messages.
        model: the model's folder; missing weights are random.
        options: further arguments of `vllm.LLM`.
        environment: all variables of its processes.
        steps_aside: whether the environment switches vllm-fl off. The engine's report is then
            empty.
        as_served: whether to start it like `vllm serve`, without `options`. Its report then has the
            facts of all `ranks`, for a lock file.
        longest: maximum tokens of a sequence, also limited by the model; None for the value in
            `options`.
        arguments: the user's arguments of `vllm serve`.
        limits: for `EngineProcess`.

    Raises:
        EngineError: it does not start.
        UsageError: vLLM rejects the `arguments`.
    """
    say(f"starting an engine {name}", error=True)
    options = {**({} if has_weights(model) else {"load_format": "dummy"}), **options}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        request = {"model": model, "options": options, "steps_aside": steps_aside}
        request["as_served"] = as_served
        request |= {"arguments": [*arguments], "longest": longest}
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*COMMAND, json.dumps(request)],
                env={**SMALL, **environment, **LEFT_ALONE, FOLDER: folder},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        try:
            yield EngineProcess(name, process, log, limits)
        finally:
            _end(process)


def _end(leader: subprocess.Popen[str]) -> None:
    """Kill the processes of a session, and wait, because the next engine needs their memory."""
    end = time.monotonic() + LAST_WORDS
    while living := _living(leader.pid):
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            break
        time.sleep(0.05)
        leader.poll()
    leader.communicate()


def _end_with_stacks(leader: subprocess.Popen[str]) -> None:
    """Abort a session's processes one after the other, so each writes its stacks."""
    for pid in sorted(_living(leader.pid), reverse=True):  # the leader, which waits, comes last
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
        end = time.monotonic() + LAST_WORDS
        while leader.poll() is None and pid in _living(leader.pid) and time.monotonic() < end:
            time.sleep(0.05)


def _living(session: int) -> list[int]:
    """Return the living processes of a session, in all process groups."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (process / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # the process has ended
            continue
        if int(of) == session and state != "Z":
            found.append(int(process.name))
    return found
