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


def test_an_ordinary_model_and_a_length_beyond_any_table() -> None:
    config = engine_config(intermediate_size=1536, rms_norm_eps=1e-5, tensor_parallel_size=2)
    sizes = sizes_of(config)
    assert (sizes.hidden, sizes.intermediate, sizes.heads, sizes.kv_heads) == (512, 768, 4, 1)
    assert (sizes.head_size, sizes.rotary, sizes.tokens) == (64, 64, (1, 2048))
    assert (sizes.max_position, sizes.epsilon) == (4096, 1e-5)
    config.model_config.max_model_len = 2_000_000
    assert sizes_of(config).max_position == LONGEST


@pytest.mark.parametrize(
    ("name", "text", "size"),
    [
        ("rotary", {"rotary_pct": 0.25}, 16),  # GPT-NeoX
        ("rotary", {"partial_rotary_factor": 0.5}, 32),
        ("rotary", {"rope_parameters": {"rope_type": "yarn", "partial_rotary_factor": 0.25}}, 16),
        ("rotary", {"rope_parameters": {"rope_dim": 24}}, 24),
        ("rotary", {"rotary_dim": 16}, 16),  # GPT-J
        ("rotary", {"model_type": "chatglm"}, 32),
        (
            "rotary",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            64,
        ),  # Gemma 3
        ("intermediate", {"ffn_hidden_size": 1408}, 1408),  # ChatGLM
        ("intermediate", {"intermediate_size": [2048, 4096]}, 2048),  # Gemma 3n: one per layer
        ("intermediate", {"ffn_dim": 3072}, 3072),
        ("intermediate", {}, None),
        ("intermediate", {"intermediate_size": "wide"}, None),
    ],
    ids=str,
)
def test_how_much_of_a_head_rotates_and_how_wide_the_mlp_is(
    name: str, text: dict[str, Any], size: int | None
) -> None:
    assert getattr(sizes_of(engine_config(**text)), name) == size


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
    later = Binding(sizes=(SizeRule("experts", lambda config: 2, 2),))
    assert sizes_of(engine_config(), own, later).more["experts"] == 64, "of the first rule"
