"""Files that extend the platform's file, groups of ops, and switches that files cannot undo."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import silu

from vllm_fl.errors import IdleSwitchError, SettingsError
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.settings.loading import load_settings, policy_from_config
from vllm_fl.settings.names import check_names
from vllm_fl.settings.schema import Settings

Write = Callable[[str, str], str]

GROUPS = {"norms": ["layer_norm", "rms_norm"], "rope": ["rotary_embedding"]}
PLATFORM = """prefer: vendor
deny_vendors: [slow]
op_backends:
  rms_norm: [stock, vendor, reference]
  silu_and_mul: [stock, vendor, reference]
"""
NORMS_ONLY = "op_backends: {group:norms: [vendor, stock]}\n"
EXTENDS = "extends: platform\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def load(write: Write) -> Callable[..., Settings]:
    """`load(text, NAME=value, …)`: settings from a platform file and a user file with `text`."""

    def load(text: str, platform: str = PLATFORM, **env: str) -> Settings:
        shipped = [("acme 1", write("p.yaml", platform))] if platform else []
        env["VLLM_FL_CONFIG"] = write("own.yaml", text)
        return load_settings(env, platform="cpu", platform_files=shipped, groups=GROUPS)

    return load


def orders(settings: Settings) -> dict[str, str]:
    return {op: str(order) for op, order in settings.policy.per_op_order.items()}


def test_a_file_that_extends_moves_what_it_names_and_nothing_else(load: Any) -> None:
    settings = load(EXTENDS + NORMS_ONLY)
    assert orders(settings) == {
        "layer_norm": "vendor|stock",
        "rms_norm": "vendor|stock",
        "silu_and_mul": "stock|vendor|reference",
    }
    assert (settings.prefer, settings.deny_vendors, settings.warnings) == ("vendor", ("slow",), ())
    pinned = {op for op, order in settings.policy.per_op_order.items() if order.pinned}
    assert pinned == {"layer_norm", "rms_norm"}
    file = settings.config
    assert settings["op_backends.rms_norm"].origin == f"{file}:2 (group:norms)"
    (beneath,) = settings["op_backends.rms_norm"].overrides
    assert beneath[1].endswith("p.yaml:4 (acme 1)")
    assert settings["op_backends.silu_and_mul"].origin.endswith("p.yaml:5 (acme 1)")
    assert {"op_backends.rms_norm", "config"} <= set(settings.chosen)
    assert "op_backends.silu_and_mul" not in settings.chosen


def test_a_file_beats_a_variable_beats_the_platform_for_what_each_names(load: Any) -> None:
    text = EXTENDS + "prefer: reference\nop_backends: {a: [vendor]}\n"
    per_op = "a=flagos;b=flagos;silu_and_mul=reference"
    settings = load(text, VLLM_FL_PREFER="flagos", VLLM_FL_PER_OP=per_op, VLLM_FL_STRICT="1")
    assert orders(settings) == {
        "a": "vendor",
        "b": "flagos",
        "rms_norm": "reference|stock|vendor",  # re-sorted by the user's `prefer`
        "silu_and_mul": "reference",
    }
    assert [value for value, _ in settings["prefer"].overrides] == ["flagos", "vendor", "flagos"]
    assert settings.strict and settings["strict"].origin == "environment VLLM_FL_STRICT"
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_an_op_beats_its_group_beats_the_default_beats_the_preference(load: Any) -> None:
    text = EXTENDS + (
        "prefer: flagos\nop_backends:\n  default: stock\n  group:norms: [vendor, stock]\n"
        "  layer_norm: {eager: [reference]}\n"
    )
    settings = load(text, "op_backends: {silu_and_mul: [vendor, stock]}")
    policy = settings.policy
    assert [
        "|".join(map(str, policy.order(op, mode, engine=True)))  # type: ignore[arg-type]
        for op, mode in (
            ("layer_norm", "eager"),
            ("layer_norm", "compiled"),
            ("rms_norm", "eager"),
            ("silu_and_mul", "eager"),  # the platform's file lists it
            ("gelu_and_mul", "eager"),
        )
    ] == ["reference", "vendor|stock", "vendor|stock", "vendor|stock", "stock"]
    (of_group,) = settings["op_backends.layer_norm"].overrides
    assert of_group[1] == f"{settings.config}:5 (group:norms)"  # the line of the group
    assert policy.names("rms_norm") and not policy.names("rms_norm", itself=True)
    assert policy.names("layer_norm", itself=True)
    assert not policy.names("gelu_and_mul")


def test_groups_stand_wherever_orders_do(write: Write) -> None:
    env = {"VLLM_FL_PER_OP": "group:norms=vendor|stock;rms_norm=stock;default=reference"}
    settings = load_settings(env, groups=GROUPS)
    assert orders(settings) == {
        "default": "reference",
        "layer_norm": "vendor|stock",
        "rms_norm": "stock",
    }
    assert settings["op_backends.layer_norm"].origin == "environment VLLM_FL_PER_OP (group:norms)"
    text = '{"group:norms": {"<=8": "vendor", "rest": "stock"}}'
    rows = load_settings({"VLLM_FL_OP_CONFIG": write("o.json", text)}, groups=GROUPS)
    assert rows.policy.ceilings("rms_norm") == (8,)
    shipped = [("acme 1", write("p.yaml", "op_backends: {group:norms: [vendor]}"))]
    settings = load_settings({}, platform_files=shipped, groups=GROUPS)
    assert not settings.policy.names("rms_norm") and str(settings.policy.per_op_order["rms_norm"])
    file = write("f.yaml", EXTENDS + "op_backends: {group:rope: [vendor]}")
    assert set(policy_from_config(file).per_op_order) == {
        "multimodal_rotary_embedding",
        "qk_norm_rope",
        "rotary_embedding",
    }


def test_the_ops_of_this_project_have_the_documented_groups() -> None:
    groups = "activations cache linear_attention moe norms quant rope"
    assert {spec.group for spec in known_contracts().contracts.values()} == {"", *groups.split()}


@pytest.mark.parametrize("text", ["extends: platform", "op_backends: {default: [vendor]}"])
def test_a_plugins_file_neither_extends_nor_orders_other_peoples_ops(
    write: Write, text: str
) -> None:
    """Otherwise files could extend each other in a circle."""
    with pytest.raises(SettingsError) as caught:
        load_settings({}, platform_files=[("acme 1", write("p.yaml", text))])
    assert caught.value.origin.endswith("p.yaml:1 (acme 1)")


IMPLS = {"rms_norm": [silu("vendor.acme")], "layer_norm": [silu("reference.torch")]}


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ("{group:norm: [stock]}", ["'norm'", "'norms'"]),  # a typo
        ("{group:audio: [stock]}", ["'audio'", "norms, rope"]),  # its ops are not installed
        ("{group:norms: [vendor:acme, reference]}", None),  # each matches an op of the group
        ("{default: [vendor:acme, reference]}", None),
        ("{group:norms: [vendor:acne, reference]}", ["group:norms", "'vendor:acme'"]),
        ("{default: [vendor:acne, reference]}", ["default", "'vendor:acme'"]),
    ],
)
def test_a_group_without_an_op_here_and_a_token_that_no_op_has_are_one_line(
    load: Any, orders: str, said: list[str] | None
) -> None:
    settings = check_names(
        load(f"{EXTENDS}op_backends: {orders}\n", ""),
        op=["rms_norm", "layer_norm", "rotary_embedding"],
        group=GROUPS,
        vendor=["acme"],
        impls=IMPLS,
    )
    assert len(settings.warnings) == (said is not None)
    assert all(word in settings.warnings[0] for word in said or ())


# Safety switches.


@pytest.mark.parametrize("begin", ["", EXTENDS])
@pytest.mark.parametrize(
    ("text", "variable", "value", "key"),
    [
        ("strict: false\n", "VLLM_FL_STRICT", "1", "strict"),
        ("deny_vendors: [a]\n", "VLLM_FL_DENY_VENDORS", "a,b", "deny_vendors"),
        ("", "VLLM_FL_STRICT", "1", "strict"),  # a complete override without `strict`
        ("prefer: vendor\n", "VLLM_FL_DENY_VENDORS", "b", "deny_vendors"),
    ],
)
def test_a_switch_that_a_file_undoes_ends_the_start(
    load: Any, begin: str, text: str, variable: str, value: str, key: str
) -> None:
    if begin and key not in text:
        assert load(begin + text, **{variable: value})  # the variable applies
        return
    with pytest.raises(IdleSwitchError) as caught:
        load(begin + text, **{variable: value})
    assert (caught.value.key, caught.value.origin) == (key, f"environment {variable}")
    assert "own.yaml" in caught.value.message


@pytest.mark.parametrize(
    ("text", "env"),
    [
        ("strict: true\n", {"VLLM_FL_STRICT": "1"}),
        ("strict: true\n", {"VLLM_FL_STRICT": "0"}),
        ("strict: false\n", {"VLLM_FL_STRICT": "0"}),
        ("deny_vendors: [a, b]\n", {"VLLM_FL_DENY_VENDORS": "b"}),
        ("allow_vendors: [a]\n", {"VLLM_FL_DENY_VENDORS": "b"}),  # also excludes b
        ("", {"VLLM_FL_ALLOW_VENDORS": "b"}),
    ],
)
def test_a_switch_that_holds_all_the_same_ends_nothing(
    load: Any, text: str, env: dict[str, str]
) -> None:
    assert load(text, **env)
