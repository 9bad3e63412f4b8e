"""MiniLM embeddings through vLLM's pooling runner."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prose
import pytest
from engine_run import BIND
from engines import IN_ONE_PROCESS
from real_engines import MINILM, PLANS, Model, Record, own_core

TEXTS = [*prose.QUESTIONS, *prose.OPENINGS, " ".join(prose.OPENINGS * 4)]

NEAR = {"float32": 1 - 1e-6, "bfloat16": 0.999}
"""The smallest cosine to the correct vector."""

Embedded = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def vectors(model: Model) -> list[list[float]]:
    """transformers' vectors in float32: means of the last layer's output over a text's tokens."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model(MINILM))
    bert: Any = AutoModel.from_pretrained(model(MINILM), dtype=torch.float32)
    with torch.inference_mode():
        means = [bert(**tokenizer(text, return_tensors="pt"))[0][0].mean(0) for text in TEXTS]
    return [vector.tolist() for vector in means]


@pytest.fixture
def embedded(model: Model, tmp_path: Path) -> Embedded:
    """`embedded(plan, eager=True, dtype="float32")`: an engine's vectors, and its report."""

    def run(plan: str, *, eager: bool, dtype: str) -> dict[str, Any]:
        out = tmp_path / "vectors.json"
        request = {
            "model": str(model(MINILM)),
            "texts": TEXTS,
            "options": {"dtype": dtype, "enforce_eager": eager, "max_model_len": 256},
            "out": str(out),
        }
        script = Path(__file__).with_name("embedding.py")
        more = {BIND: str(own_core()), "VLLM_FL_DISPATCH_DEBUG": "1"}
        done = subprocess.run(
            [sys.executable, str(script), json.dumps(request)],
            env={**os.environ, **IN_ONE_PROCESS, **more, **PLANS[plan]},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        result: dict[str, Any] = json.loads(out.read_text())
        return result

    return run


def cosine(one: list[float], other: list[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / (math.hypot(*one) * math.hypot(*other))


@pytest.mark.parametrize(
    ("plan", "eager", "dtype"),
    [
        ("shipped", True, "float32"),
        *(
            pytest.param(*run, marks=pytest.mark.slow)
            for run in (
                ("stock", True, "float32"),
                ("reference", True, "float32"),
                ("reference", True, "bfloat16"),
                ("reference", False, "float32"),
            )
        ),
    ],
)
def test_the_vectors_are_those_of_transformers(
    plan: str,
    eager: bool,
    dtype: str,
    vectors: list[list[float]],
    embedded: Embedded,
    record_property: Record,
) -> None:
    result = embedded(plan, eager=eager, dtype=dtype)
    cosines = [cosine(*pair) for pair in zip(result["vectors"], vectors, strict=True)]
    engine = f"{MINILM} {dtype} {'eager' if eager else 'compiled'} {plan}"
    record_property("seen", f"{engine} | smallest cosine {min(cosines):.9f}")
    assert min(cosines) >= NEAR[dtype]
    assert cosine(vectors[0], vectors[1]) < 0.9, "texts of another meaning have other vectors"
    if result["report"]:
        assert result["report"][0]["demotions"] == {}
