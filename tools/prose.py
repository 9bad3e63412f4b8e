"""Compare an engine with stock, and with transformers in float32, on texts for real models.

Correct engines round differently. Perplexity hides differences, because errors of both signs
cancel. The log-probabilities are therefore compared per token, by quantiles. The likeliest tokens
are compared at positions with a clear lead in stock.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine_run import Job

__all__ = [
    "APART",
    "CLEAR",
    "EXACT",
    "NEW_TOKENS",
    "OPENINGS",
    "QUESTIONS",
    "RIGHT",
    "TEXT_TOKENS",
    "Bars",
    "Distance",
    "disagreements",
    "distance",
    "job",
    "logps",
    "problems",
    "truth",
]

TEXT_TOKENS = 512
"""Tokens per text."""

NEW_TOKENS = 24
"""Tokens per answer."""

CLEAR = 0.7
"""A lead in nats that rounding does not reverse. In 1 200 tokens, two correct bfloat16 engines
agreed on the likeliest token wherever its lead was at least 0.3.
"""

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many days does a week have? Answer with a number.",
    "Explain in two sentences why the sky is blue.",
    "Name three colours.",
    "Translate into French: good morning.",
    "What does a compiler do?",
    "Write a Python function that adds two numbers.",
)

OPENINGS = (
    "The capital of France is",
    "Once upon a time there was a",
    "A week has seven days: Monday,",
    "The sky is blue because",
    "def add(a, b):\n    return",
    "Water boils at a temperature of",
    "The first president of the United States was",
    "In 1969 the first man walked on the",
)


def _texts(tokenizer: Any) -> list[list[int]]:
    """Token ids of a licence and of Python's documentation, which every machine has."""
    import argparse
    import decimal
    import logging
    import random

    licence = (Path(__file__).resolve().parent.parent / "LICENSE").read_text()
    documented = (argparse, decimal, random, logging, argparse.ArgumentParser, logging.Logger)
    documentation = "\n\n".join(filter(None, map(inspect.getdoc, documented)))
    # Collapse white space, because licences have long runs of spaces, and each run is a token.
    flowing = (" ".join(text.split()) for text in (licence, documentation))
    return [tokenizer(text)["input_ids"][:TEXT_TOKENS] for text in flowing]


def _prompts(tokenizer: Any) -> list[list[int]]:
    """Token ids of questions, in the model's chat template if it has one."""
    if not tokenizer.chat_template:
        return [tokenizer(text)["input_ids"] for text in OPENINGS]
    asked = ([{"role": "user", "content": question}] for question in QUESTIONS)
    applied = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for messages in asked
    )
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in applied]


@functools.cache
def _read(folder: str) -> tuple[list[list[int]], list[list[int]]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return _texts(tokenizer), _prompts(tokenizer)


def job(folder: Path, *, eager: bool = True, adapter: str = "", **options: Any) -> Job:
    """Job with the questions as one batch, followed by the scored texts."""
    options = {"max_model_len": TEXT_TOKENS + NEW_TOKENS, "max_num_seqs": 16, **options}
    scored, asked = _read(str(folder))
    return Job(
        str(folder),
        [asked],
        new_tokens=NEW_TOKENS,
        eager=eager,
        options=options,
        logits=False,
        scored=scored,
        leads=True,
        adapter=adapter,
    )


def logps(result: dict[str, Any]) -> list[float]:
    """Log-probability of each token of the texts, except each first."""
    return [logp for text in result["logprobs"] for logp in text]


def truth(folder: Path, change: Callable[[Any], None] | None = None) -> list[float]:
    """Compute the same log-probabilities in transformers, in float32.

    `change` can modify transformers' model first.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[float] = []
    with torch.inference_mode():
        if change:
            change(model)
        for ids in _read(str(folder))[0]:
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
            for first in range(0, len(ids) - 1, 64):  # 64 rows of logits fit in memory
                following = ids[first + 1 : first + 65]
                rows = model.lm_head(hidden[first : first + len(following)]).log_softmax(-1)
                found += [row[token].item() for row, token in zip(rows, following, strict=True)]
    return found


@dataclass(frozen=True)
class Distance:
    """Differences between log-probabilities of two engines.

    Args:
        median, p99, largest: of the absolute differences.
        mean: of the signed differences; shows systematic errors.
    """

    median: float
    p99: float
    largest: float
    mean: float

    def __str__(self) -> str:
        return (
            f"median {self.median:.2g}, p99 {self.p99:.2g}, largest {self.largest:.2g}, "
            f"mean {self.mean:+.2g}"
        )


def distance(mine: Sequence[float], other: Sequence[float]) -> Distance:
    """Differences of `mine` from `other`; infinite if any value is not finite."""
    differences = [a - b for a, b in zip(mine, other, strict=True)]
    if not all(map(math.isfinite, differences)):
        return Distance(math.inf, math.inf, math.inf, math.inf)
    sizes = sorted(map(abs, differences))
    return Distance(
        sizes[len(sizes) // 2],
        sizes[len(sizes) * 99 // 100],
        sizes[-1],
        sum(differences) / len(differences),
    )


@dataclass(frozen=True)
class Bars:
    """Limits of a `Distance` for a correct engine."""

    median: float
    p99: float
    mean: float

    def __str__(self) -> str:
        return f"median {self.median:.2g}, p99 {self.p99:.2g}, mean {self.mean:.2g}"

    def exceeded(self, found: Distance) -> list[str]:
        """Describe each exceeded limit."""
        seen = {"median": found.median, "p99": found.p99, "mean": abs(found.mean)}
        above = ((name, value, getattr(self, name)) for name, value in seen.items())
        return [f"{name} {v:.2g} (at most {bar:.2g})" for name, v, bar in above if not v <= bar]


RIGHT = Bars(median=0.05, p99=0.4, mean=0.02)
"""Limits of a correct bfloat16 engine's distance from stock. With 30 layers, the rounding of both
engines amounts to a median of 0.03 and a p99 of 0.26."""

APART = 2
"""Limit of the p99 distance between two correct engines, as a multiple of stock's p99 error. A
model that magnifies rounding magnifies the errors of both. Independent errors give 1.41."""

WORSE = 1.5
"""Limit of a correct engine's median error, as a multiple of stock's median error. Rounding twice
where stock rounds once gives 1.41."""

EXACT = Bars(median=2e-5, p99=2e-4, mean=2e-5)
"""Limits of a correct float32 engine; its kernels differ from stock only in the order of sums."""


def problems(stock: dict[str, Any], mine: dict[str, Any], true: Sequence[float]) -> list[str]:
    """Explain why a bfloat16 engine is less accurate than stock; empty if it is not.

    It may be too far from stock, farther from `true` than stock, or have another likeliest token
    although stock's lead is clear.
    """
    of_stock, of_mine = logps(stock), logps(mine)
    own = distance(of_stock, true)
    apart = replace(RIGHT, p99=max(RIGHT.p99, APART * own.p99))
    bars = Bars(WORSE * own.median, 2 * own.p99, abs(own.mean) + 0.01)
    return [
        *(f"to stock: {found}" for found in apart.exceeded(distance(of_mine, of_stock))),
        *(f"to the truth: {found}" for found in bars.exceeded(distance(of_mine, true))),
        *disagreements(stock, mine, true=true),
    ]


def disagreements(
    stock: dict[str, Any],
    mine: dict[str, Any],
    clear: float = CLEAR,
    true: Sequence[float] | None = None,
) -> list[str]:
    """Describe the positions at which the likeliest tokens differ although stock's lead is clear.

    In texts, all tokens are compared; a difference is ignored if `mine` is nearer to `true` than
    stock. Answers are compared up to the first token that differs, because afterwards the engines
    have different inputs.

    Raises:
        ValueError: stock's lead is clear at fewer than 300 positions, too few for a conclusion.
    """
    places = [(text, at) for text, of in enumerate(stock["logprobs"]) for at in range(len(of))]
    rows = zip(places, logps(stock), logps(mine), true or logps(stock), strict=True)
    nearer = {place for place, other, own, exact in rows if abs(own - exact) < abs(other - exact)}
    pairs = list(zip(stock["leads"], mine["leads"], strict=True))
    answers = zip(stock["tokens"], mine["tokens"], strict=True)
    leads = zip(stock["answer_leads"], mine["answer_leads"], strict=True)
    for (expected, got), (of_stock, of_mine) in zip(answers, leads, strict=True):
        same = next((i for i, token in enumerate(expected) if token != got[i]), len(expected))
        pairs.append((of_stock[: same + 1], of_mine[: same + 1]))
    compared, found = 0, []
    for which, (of_stock, of_mine) in enumerate(pairs):
        for at, ((token, lead), (other, _)) in enumerate(zip(of_stock, of_mine, strict=True)):
            if lead >= clear:
                compared += 1
                if other != token and (which, at) not in nearer:
                    found.append(f"{which}:{at}: {other} for {token}, which leads by {lead:.2f}")
    if compared < 300:
        raise ValueError(f"stock's lead is clear in only {compared} positions")
    return found
