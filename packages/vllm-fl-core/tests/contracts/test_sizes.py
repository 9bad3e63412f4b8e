"""Sizes from a model's configuration."""

from __future__ import annotations

from typing import Any

import pytest
from configs import engine_config

from vllm_fl.contracts import ModelSizes
from vllm_fl.contracts.binding import LONGEST, Binding, SizeRule, model_sizes
from vllm_fl_ops.contracts.rules import RULES, typical_sizes

ALL = Binding(sizes=RULES)


def sizes_of(config: Any, *bindings: Binding) -> ModelSizes:
    return model_sizes(config, bindings or [ALL])


def test_an_ordinary_model() -> None:
    sizes = sizes_of(
        engine_config(intermediate_size=1536, rms_norm_eps=1e-5, tensor_parallel_size=2)
    )
    assert (sizes.hidden, sizes.intermediate, sizes.heads, sizes.kv_heads) == (512, 768, 4, 1)
    assert (sizes.head_size, sizes.rotary, sizes.tokens) == (64, 64, (1, 2048))
    assert (sizes.max_position, sizes.epsilon) == (4096, 1e-5)


def test_a_length_beyond_any_table_is_bounded() -> None:
    config = engine_config(intermediate_size=1536)
    config.model_config.max_model_len = 2_000_000
    assert sizes_of(config).max_position == LONGEST


@pytest.mark.parametrize(
    ("text", "rotary"),
    [
        ({"rotary_pct": 0.25}, 16),  # GPT-NeoX
        ({"partial_rotary_factor": 0.5}, 32),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, 16),
        ({"rope_parameters": {"rope_dim": 24}}, 24),
        ({"rotary_dim": 16}, 16),  # GPT-J
        ({"model_type": "chatglm"}, 32),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 64),  # Gemma 3
    ],
    ids=str,
)
def test_how_much_of_a_head_rotates(text: dict[str, Any], rotary: int) -> None:
    assert sizes_of(engine_config(intermediate_size=1536, **text)).rotary == rotary


@pytest.mark.parametrize(
    ("text", "intermediate"),
    [
        ({"ffn_hidden_size": 1408}, 1408),  # ChatGLM
        ({"intermediate_size": [2048, 4096]}, 2048),  # Gemma 3n has one width per layer
        ({"ffn_dim": 3072}, 3072),
        ({}, None),
        ({"intermediate_size": "wide"}, None),
    ],
    ids=str,
)
def test_how_wide_the_mlp_is(text: dict[str, Any], intermediate: int | None) -> None:
    assert sizes_of(engine_config(**text)).intermediate == intermediate


def test_an_unknown_size_is_none_and_the_others_are_read() -> None:
    sizes = sizes_of(
        engine_config(head_size=NotImplementedError("no attention"), intermediate_size=1536)
    )
    assert sizes.head_size is None and sizes.rotary is None
    assert (sizes.hidden, sizes.intermediate, sizes.heads) == (512, 1536, 8)


def test_a_binding_may_ask_sizes_of_its_own() -> None:
    def broken(config: Any) -> float:
        raise RuntimeError("no such thing")

    own = Binding(sizes=(SizeRule("experts", lambda config: 64, 8), SizeRule("odd", broken, 3)))
    sizes = sizes_of(engine_config(), own)
    assert dict(sizes.more) == {"experts": 64, "odd": None}
    assert "odd" in sizes.unknown and "experts" not in sizes.unknown
    assert dict(typical_sizes([own]).more) == {"experts": 8, "odd": 3}


def test_of_two_rules_with_one_name_the_first_is_asked() -> None:
    first, second = (Binding(sizes=(SizeRule("experts", lambda c, n=n: n, n),)) for n in (1, 2))
    assert sizes_of(engine_config(), first, second).more["experts"] == 1
