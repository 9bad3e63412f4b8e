"""A real server with the plugins, talked to by the openai client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")

START_LIMIT = 300.0
"""Seconds until the server must answer: many times what it takes on two cores."""


@dataclass
class Server:
    client: Any
    log: Path
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def server(
    model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "stderr.log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model("qwen3")), "--served-model-name", "tiny", "--skip-tokenizer-init",
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager",
        # Else vLLM kills a worker that has not said its counts after 5 s, as on a busy machine.
        "--shutdown-timeout", "60",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_FL_DISPATCH_DEBUG": "1",
        "VLLM_FL_PER_OP": "rms_norm=vendor|reference",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)
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
        yield Server(client, log, process)
    finally:
        process.terminate()
        process.wait(timeout=120)


def complete(server: Server, prompt: list[int], **options: Any) -> Any:
    return server.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=8, temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True}, **options,
    )  # fmt: skip


def test_a_completion(server: Server) -> None:
    answer = complete(server, [5, 6, 7, 8])
    assert answer.usage.completion_tokens == 8


def test_a_streamed_completion_is_the_same(server: Server) -> None:
    whole = complete(server, [9, 10, 11]).choices[0].token_ids
    parts = [
        chunk.choices[0].token_ids or [] for chunk in complete(server, [9, 10, 11], stream=True)
    ]
    assert [token for part in parts for token in part] == whole


def test_sixty_four_requests_at_once(server: Server) -> None:
    prompts = [[3 + i, 5 + i, 7 + i] for i in range(64)]
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt), prompts))
    assert [a.usage.completion_tokens for a in answers] == [8] * 64


def test_the_plan_is_on_stderr_and_the_counts_at_shutdown(server: Server) -> None:
    """Last in this module: it ends the server."""
    server.process.terminate()
    server.process.wait(timeout=120)
    log = server.log.read_text()
    plan = [line for line in log.splitlines() if "ops planned" in line]
    assert len(plan) == 1 and "rms_norm=vendor.cpu" in plan[0]
    assert "[vllm_fl." in plan[0]
    assert "fallbacks none, calls {" in log and "'vendor.cpu':" in log
