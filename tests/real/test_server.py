"""A real server on a real model, with all client features at once."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import prose
import pytest
from engine_run import BIND
from engines import VENDOR
from real_engines import SMOLLM2, Model, True_, own_core
from servers import END_LIMIT, Server, serving

CLIENTS = 32

STEP = 256
"""Maximum tokens of a step: longer prompts are prefilled in chunks."""

SHARED = "Answer the question of a child in one short sentence. " * 20
"""Common prefix of all prompts; clients share it in the prefix cache."""

SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
MODES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "eager": (("--enforce-eager",), {}),
    "compiled": ((), VENDOR),  # the shipped plan keeps all stock there
    "speculating": (("--enforce-eager", f"--speculative-config={json.dumps(SPECULATION)}"), {}),
}
"""Name -> options and variables."""


@pytest.fixture(
    scope="module",
    params=[
        mode if mode == "eager" else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES
    ],
)
def server(
    request: pytest.FixtureRequest, model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "stderr.log"
    options = ("--served-model-name", "real", "--max-model-len", "2048", "--max-num-seqs", "64")
    chunked = ("--max-num-batched-tokens", str(STEP), "--enable-prefix-caching")
    variables = {"VLLM_FL_SHADOW": "0.05", "VLLM_FL_DISPATCH_DEBUG": "1", BIND: str(own_core())}
    mode, plan = MODES[request.param]
    with serving(model(SMOLLM2), log, *options, *chunked, *mode, **variables, **plan) as started:
        yield started


def complete(server: Server, prompt: str | list[int], **options: Any) -> Any:
    """32 new tokens, each with the two likeliest candidates."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    asked = {"max_tokens": 32, "temperature": 0, "logprobs": 2, "extra_body": extra, **options}
    return server.client.completions.create(model="real", prompt=prompt, **asked)


def chat(server: Server, text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    asked = {"max_tokens": 48, "temperature": 0, **options}
    return server.client.chat.completions.create(model="real", messages=messages, **asked)


def assert_alike(first: Any, second: list[int]) -> None:
    """Tokens are equal up to one that is about as likely as the next: cached values are not
    recomputed, and other batch sizes sum in another order."""
    answer = first.choices[0]
    for token, other, top in zip(
        answer.token_ids, second, answer.logprobs.top_logprobs, strict=True
    ):
        if token != other:
            likeliest, next_one = sorted(top.values(), reverse=True)[:2]
            assert likeliest - next_one < prose.CLEAR, (token, other, top)
            return


def metric(server: Server, name: str) -> float:
    """The sum of all vLLM metrics with this name."""
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    lines = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M)
    assert lines, name
    return sum(map(float, lines))


def test_the_log_probabilities_of_a_text_are_the_models(
    server: Server, model: Model, true: True_
) -> None:
    """Each text is longer than a step, so its prompt is prefilled in chunks."""
    texts = prose.job(model(SMOLLM2)).scored
    found = []
    for text in texts:
        assert len(text) > STEP
        answer = complete(server, text, echo=True, max_tokens=1)
        found += answer.choices[0].logprobs.token_logprobs[1 : len(text)]
    assert not prose.RIGHT.exceeded(prose.distance(found, true(SMOLLM2)))


def test_thirty_two_clients_twice(server: Server) -> None:
    questions = [f"{SHARED}Question {i}: what is {i} and {i + 1}? Answer:" for i in range(CLIENTS)]
    before = metric(server, "vllm:prefix_cache_hits_total")
    with ThreadPoolExecutor(CLIENTS) as pool:
        first, second = (
            list(pool.map(lambda text: complete(server, text), questions)) for _ in range(2)
        )
    assert [answer.usage.completion_tokens for answer in (*first, *second)] == [32] * 2 * CLIENTS
    for one, two in zip(first, second, strict=True):
        assert_alike(one, two.choices[0].token_ids)
    hits = metric(server, "vllm:prefix_cache_hits_total") - before
    assert hits >= CLIENTS * 200, "the second time all prompts were there, of 200 tokens and more"


def test_a_stream_says_what_the_whole_answer_says(server: Server) -> None:
    start = "The sea is a vast and mysterious body of water"
    whole = complete(server, start)
    parts = [part.choices[0] for part in complete(server, start, stream=True) if part.choices]
    assert_alike(whole, [token for part in parts for token in part.token_ids or []])
    assert len(parts) > 4
    answer = chat(server, "Write one sentence about the sea.").choices[0].message.content
    assert len(answer.split()) > 5


def test_clients_that_go_away_leave_nothing_behind(server: Server) -> None:
    def leave(i: int) -> None:
        stream = complete(server, f"{i}. Once upon a time", max_tokens=1500, stream=True)
        next(iter(stream))
        stream.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(8)))
    deadline = time.monotonic() + 60
    waiting = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while left := sum(metric(server, name) for name in waiting):
        assert time.monotonic() < deadline, f"{left} requests are there still"
        time.sleep(0.5)
    assert complete(server, "One, two, three,").usage.completion_tokens == 32


def test_an_answer_in_the_form_of_a_json_schema(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Berlin"]},
            "inhabitants": {"type": "integer", "minimum": 1, "maximum": 9999},
        },
        "required": ["city", "inhabitants"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = chat(server, "Tell me of the capital of France, as JSON.", response_format=form)
    content = json.loads(answer.choices[0].message.content)
    assert set(content) == {"city", "inhabitants"}
    assert content["city"] in ("Paris", "Berlin") and isinstance(content["inhabitants"], int)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["speculating"], indirect=True)
def test_what_was_guessed_is_accepted(server: Server) -> None:
    """A prompt that repeats itself lets an n-gram guess."""
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    before = metric(server, accepted)
    answer = complete(server, "one two three four five six seven " * 10)
    assert answer.usage.completion_tokens == 32
    assert metric(server, accepted) > before


def test_the_plan_ran_and_its_shadow_was_not_alarmed(server: Server) -> None:
    """Last in this module: it ends the server."""
    server.process.terminate()
    server.process.wait(timeout=END_LIMIT)
    log = server.log.read_text()
    assert len([line for line in log.splitlines() if " planned: " in line]) == 1
    assert "FL410" not in log
    assert "fallbacks none" in log
    assert "Shadow: implementation" not in log
    assert re.search(r"Shadow: .* all within the tolerance", log), log[-3000:]
