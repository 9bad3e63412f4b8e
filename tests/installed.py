"""An environment with some of our distributions, used as a user would."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_run

import envs

OPS = """
import json
from vllm_fl.dispatch import get_default_manager
manager = get_default_manager()
manager.ensure_initialized()
snapshot = manager.registry.snapshot()
found = {}
for op in snapshot.ops:
    trace = manager.trace(op, without_layer=True)
    found[op] = {
        "selected": trace.selected and trace.selected.impl_id,
        "candidates": [
            {
                "impl_id": each.impl.impl_id,
                "vendor": each.impl.vendor,
                "priority": each.impl.priority,
                "distribution": snapshot.owners[op, each.impl.impl_id].distribution,
                "status": each.status,
                "reason": each.reason,
            }
            for each in trace.candidates
        ],
    }
print(json.dumps(found))
"""

MODEL = """
import json, pathlib, sys
sys.path.insert(0, {tools!r})
import tiny_model
print(json.dumps(str(tiny_model.make(pathlib.Path({folder!r})))))
"""


@dataclass(frozen=True)
class Installed:
    env: envs.Env

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `python *args` outside the repository; only installed code is found."""
        return self.env.run(*args, check=False, cwd=self.env.path, **variables)

    def script(self, code: str, **variables: str) -> Any:
        """Run `code` and return the JSON that it prints last."""
        done = self.run("-c", code, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def command(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.env.path / "bin" / "vllm-fl"), *args],
            check=False,
            env=self.env.variables(**variables),
            cwd=self.env.path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def kit(self, *args: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run pytest on the tests of a backend."""
        options = ("-q", "-p", "no:cacheprovider")
        return self.run("-m", "pytest", *options, *map(str, args), **variables)

    def model(self, folder: Path) -> str:
        """The folder of a tiny model, made by this environment's torch."""
        path: str = self.script(MODEL.format(tools=str(envs.ROOT / "tools"), folder=str(folder)))
        return path

    def serve(self, job: engine_run.Job, **variables: str) -> dict[str, Any]:
        """The result of an engine in this environment."""
        env = {"PYTHONPATH": "", **self.env.variables(**variables)}
        return engine_run.run(job, python=self.env.python, **env)

    def plugins(self, **variables: str) -> dict[str, dict[str, Any]]:
        """Plugins from `doctor --json` by distribution, except always installed distributions."""
        found = self.answer("doctor", status=None, **variables)["plugins"]
        always = ("vllm-fl-ops", "vllm-fl-tools", "vllm-fl-verify")
        return {p["distribution"]: p for p in found if p["distribution"] not in always}

    def ops(self, **variables: str) -> dict[str, dict[str, Any]]:
        """`selected` and `candidates` of each op, in a script."""
        found: dict[str, dict[str, Any]] = self.script(OPS, **variables)
        return found

    def answer(self, *words: str, status: int | None, **variables: str) -> dict[str, Any]:
        """The JSON of `vllm-fl VERB --json`; `status` is its exit status, None for 0 or 1."""
        done = self.command(*words, "--json", **variables)
        allowed = (0, 1) if status is None else (status,)
        assert done.returncode in allowed, done.stdout + done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        assert report["schema"] == 1
        return report

    def explained(self, op: str, **variables: str) -> dict[str, Any]:
        """The output of `explain` for an op in eager mode."""
        (eager,) = self.answer("explain", op, "--mode", "eager", status=None, **variables)["modes"]
        found: dict[str, Any] = eager
        return found


Install = Callable[..., Installed]
"""The fixture `install`: distributions -> an environment with core, its ops and them."""
