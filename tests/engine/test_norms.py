"""Norms and layers of plugins in an engine: the older form, names, refusals while it serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Runner, batches
from engine_run import EngineFailed, Job, largest_difference, run

Plugin = Callable[..., dict[str, str]]

DEBUG = {"VLLM_FL_DISPATCH_DEBUG": "1"}


def orders(**tokens: str) -> dict[str, str]:
    """VLLM_FL_PER_OP: these orders, and the reference for the rest."""
    every = {"rms_norm": "", "rotary_embedding": "", "silu_and_mul": "", **tokens}
    return {
        "VLLM_FL_PER_OP": ";".join(
            f"{op}={'|'.join(filter(None, (first, 'reference')))}" for op, first in every.items()
        )
    }


def test_layers_of_the_older_form_serve_in_an_eager_engine(
    engine: Runner, model: Callable[[str], Path], plugin: Plugin
) -> None:
    """Their first parameter is the layer. Not compared at start, so that it is all theirs."""
    vendor = "impl:vendor.older"
    ours = run(
        Job(str(model("qwen3")), batches()),
        **plugin("older_layers"),
        **orders(rms_norm=vendor, rotary_embedding=vendor, silu_and_mul=vendor),
        **DEBUG,
        VLLM_FL_PREFLIGHT="off",
    )
    stock = engine("qwen3", "stock-native")
    assert ours["tokens"] == stock["tokens"]
    worst, magnitude = largest_difference(stock, ours)
    assert worst <= 0.05 * magnitude
    report = ours["report"][0]
    for op in ("rms_norm", "rotary_embedding", "silu_and_mul"):
        assert report["ops"][op]["impl"] == "vendor.older"
        assert report["calls"][op]["vendor.older"] > 0
    assert report["fallbacks"] == {} and report["demotions"] == {}


@pytest.mark.parametrize(
    "eager",
    [pytest.param(True, id="eager", marks=pytest.mark.slow), pytest.param(False, id="compiled")],
)
def test_names_that_look_alike_are_not_mixed_up(
    engine: Runner, model: Callable[[str], Path], plugin: Plugin, tmp_path: Path, eager: bool
) -> None:
    notes = tmp_path / "notes"
    ours = run(
        Job(str(model("qwen3")), batches(), eager=eager),
        **plugin("look_alikes"),
        **orders(
            rms_norm="impl:vendor.华为|impl:vendor.é|impl:vendor.a_b",
            silu_and_mul="impl:vendor.a-b|impl:vendor.a_b|impl:vendor.A_B",
        ),
        **DEBUG,
        LOOK_ALIKES=str(notes),
    )
    ran = set(notes.read_text().splitlines())
    assert ran == {"rms_norm vendor.华为", "silu_and_mul vendor.a-b"}
    assert ours["tokens"] == engine("qwen3", "stock-native", eager)["tokens"]
    report = ours["report"][0]
    assert report["ops"]["rms_norm"]["impl"] == "vendor.华为"
    assert set(report["calls"]["rms_norm"]) == {"vendor.华为"}
    assert set(report["calls"]["silu_and_mul"]) == {"vendor.a-b"}


def test_a_norm_that_refuses_while_it_serves_leaves_the_call_to_the_next(
    engine: Runner, model: Callable[[str], Path], plugin: Plugin
) -> None:
    ours = run(
        Job(str(model("qwen3")), batches()),
        **plugin("late_refusal"),
        **orders(rms_norm="impl:vendor.late"),
    )
    assert ours["tokens"] == engine("qwen3", "stock-native")["tokens"]
    report, log = ours["report"][0], ours["log"]
    assert report["ops"]["rms_norm"]["impl"] == "vendor.late"
    assert report["fallbacks"]["rms_norm"]["reference.torch"] > 0 and report["demotions"] == {}
    refused = "Implementation 'vendor.late' refused op 'rms_norm': NotImplementedError: not while"
    assert log.count(refused) == 1
    assert log.count("Op 'rms_norm' fallback to 'reference.torch'") == 1


def test_strict_mode_raises_the_refusal_by_name(
    model: Callable[[str], Path], plugin: Plugin
) -> None:
    with pytest.raises(EngineFailed) as failure:
        run(
            Job(str(model("qwen3")), batches()),
            **plugin("late_refusal"),
            **orders(rms_norm="impl:vendor.late"),
            VLLM_FL_STRICT="1",
        )
    log = failure.value.log
    assert "ops planned" in log, "it starts, and refuses its first request"
    assert "Implementation 'vendor.late' refused op 'rms_norm': NotImplementedError" in log
