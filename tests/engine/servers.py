"""A real vLLM server in its own process, with an openai client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START_LIMIT = 900.0
"""Seconds until the server must respond: many times a startup with compilation on two cores."""

END_LIMIT = 300.0
"""Seconds within which the server must exit."""


@dataclass
class Server:
    client: Any
    url: str
    log: Path
    process: subprocess.Popen[bytes]


@contextmanager
def serving(model: Path, log: Path, *options: str, **variables: str) -> Iterator[Server]:
    """vLLM's server on this model, ended after the block; `options` are command-line arguments."""
    openai = pytest.importorskip("openai")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port),
        # vLLM otherwise kills a worker that has not reported its counts after 5 s (busy machine).
        "--shutdown-timeout", "60", *options,
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **variables}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    url = f"http://127.0.0.1:{port}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
    try:
        deadline = time.monotonic() + START_LIMIT
        while True:
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"the server did not start:\n{log.read_text()[-5000:]}")
                time.sleep(1)
        yield Server(client, url, log, process)
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
