"""An environment with some of our distributions, seen as a user sees it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import envs


@dataclass(frozen=True)
class Installed:
    """An environment, and the ways to look into it."""

    env: envs.Env

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `python *args` outside of the repository, so that only what is installed counts."""
        return self.env.run(*args, check=False, cwd=self.env.path, **variables)

    def script(self, code: str, **variables: str) -> Any:
        """Run `code` and return the JSON that it prints last."""
        done = self.run("-c", code, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def command(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the installed command `vllm-fl`."""
        return subprocess.run(
            [str(self.env.path / "bin" / "vllm-fl"), *args],
            check=False,
            env=self.env.variables(**variables),
            cwd=self.env.path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def plugins(self, **variables: str) -> dict[str, dict[str, Any]]:
        """Return the plugins that `doctor --json` lists, without ours, by distribution."""
        found = self.answer("doctor", status=None, **variables)["plugins"]
        always = ("vllm-fl-ops", "vllm-fl-tools", "vllm-fl-verify")
        return {p["distribution"]: p for p in found if p["distribution"] not in always}

    def ops(
        self, mode: str = "script", *, status: int | None = None, **variables: str
    ) -> dict[str, dict[str, Any]]:
        """What `vllm-fl ops --json` lists, by op."""
        answer = self.answer("ops", "--mode", mode, status=status, **variables)
        return {op["op"]: op for op in answer["ops"]}

    def answer(self, *words: str, status: int | None, **variables: str) -> dict[str, Any]:
        """What `vllm-fl VERB --json` prints; `status` is its exit status, None for 0 or 1."""
        done = self.command(*words, "--json", **variables)
        allowed = (0, 1) if status is None else (status,)
        assert done.returncode in allowed, done.stdout + done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        assert told["schema"] == 1
        return told


Install = Callable[..., Installed]
"""The fixture `install`: distributions -> an environment with core, its ops and them."""
