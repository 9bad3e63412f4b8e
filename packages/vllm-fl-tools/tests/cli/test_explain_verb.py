"""`vllm-fl explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import THREE, Command, Plugin

from vllm_fl.plugins.registry import known_contracts
from vllm_fl_tools.cli.explain import documentation_of, signature_of, targets_of


def both(fl: Command, op: str, **variables: str) -> tuple[dict[str, Any], ...]:
    """The views of a script, and of an engine in both modes."""
    views = [
        view
        for more in (("--script",), ())
        for view in fl("explain", op, *more, "--json", **variables).json()["modes"]
    ]
    assert [view["mode"] for view in views] == ["script", "eager", "compiled"]
    return tuple(views)


def test_all_three_modes_with_order_origin_and_reasons(fl: Command, plugin: Plugin) -> None:
    plugin(THREE)
    script, eager, compiled = both(fl, "silu_and_mul", VLLM_FL_PLATFORM="none")
    assert script["order"] == ["flagos", "vendor", "reference"]
    assert script["origin"] == "prefer=flagos, default"
    assert [(c["impl_id"], c["status"], c["reason"]) for c in script["candidates"]] == [
        ("vendor.acme", "selected", "the order lists vendor"),
        ("reference.torch", "eligible", "the order lists reference"),
        ("vendor.zeta", "rejected", "not available: no zeta card"),
    ]
    for view in (eager, compiled):
        assert view["order"] == ["flagos", "vendor", "stock", "reference"]
        assert [(c["impl_id"], c["status"], c["reason"]) for c in view["candidates"]][:3] == [
            ("vendor.acme", "selected", "the order lists vendor"),
            ("stock.vllm", "eligible", "default, no order for this op"),
            ("reference.torch", "eligible", "the order lists reference"),
        ]
    assert "stock.vllm" not in [c["impl_id"] for c in script["candidates"]]


@pytest.mark.parametrize("op", sorted(known_contracts().contracts))
def test_the_documentation_of_an_op_is_whole(op: str) -> None:
    spec, binding = known_contracts().contracts[op], known_contracts().bindings[op]
    head = signature_of(spec, width=1) or ""
    assert "'torch" not in head and '"' not in head and head.startswith(f"{op}(\n")
    for name, parameter in spec.signature.parameters.items():
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        (line,) = [x for x in head.splitlines() if x.startswith(f"    {name}: ")]
        assert line.endswith(f"{default},")
    assert binding.not_reached and documentation_of(spec)
    targets = targets_of(binding)
    assert len(set(targets)) == len(targets) and bool(targets) == bool(binding.targets)


def test_the_pages_of_an_op(fl: Command, plugin: Plugin) -> None:
    plugin()
    spec = known_contracts().contracts["rms_norm"]
    page, facts = fl("explain", "rms_norm").out, fl("explain", "rms_norm", "--json").json()
    assert facts["signature"].startswith("rms_norm(") and facts["bypasses"]
    assert all(bypass in page for bypass in facts["bypasses"])
    assert "vllm-fl explain rms_norm --contract" in page and "Args:" not in page
    done = fl("explain", "rms_norm", "--contract")
    assert done.status == 0 and documentation_of(spec) in done.out
    assert all(tolerance.reason in done.out for tolerance in spec.tolerances.values())
    facts = fl("explain", "rms_norm", "--contract", "--json").json()
    assert facts["dtypes"] == list(spec.dtypes)
    assert set(facts["tolerances"]["results"]) == set(spec.tolerances)


def test_what_only_vllm_knows_is_not_said_without_it(fl: Command, plugin: Plugin) -> None:
    """tests/engine tests a real vLLM with layers replaced by other plugins."""
    plugin(THREE)
    replaced = fl("explain", "silu_and_mul", "--json").json()["replaced"]
    assert replaced == {"layers": [], "error": "vLLM is not installed"}
    script = fl("explain", "silu_and_mul", "--script", "--json").json()
    assert script["replaced"] == {"layers": [], "error": None}
    engine = fl("explain", "silu_and_mul", "--mode", "eager").out
    inside = "Targets in vLLM: layer SiluAndMul; operator _C::silu_and_mul."
    assert inside in engine and inside not in fl("explain", "silu_and_mul", "--script").out
    for more in (["--model", "m"], ["--dtype", "half"], ["--script", "--model", "m"]):
        assert fl("explain", "silu_and_mul", *more).status == 2


BY_SIZE = "op_backends:\n  silu_and_mul: {<=16: vendor:acme, rest: [reference, stock]}\n"


def test_an_order_by_size_is_shown_row_by_row(fl: Command, plugin: Plugin, tmp_path: Path) -> None:
    plugin()
    path = tmp_path / "fl.yaml"
    path.write_text(BY_SIZE)
    variables = {"VLLM_FL_CONFIG": str(path)}
    question = ("explain", "silu_and_mul", "--mode", "compiled")
    (view,) = fl(*question, "--json", **variables).json()["modes"]
    assert view["order"] == ["reference", "stock"] and view["selected"] == "stock.vllm"
    ((row),) = view["rows"]
    assert (row["up_to"], row["order"], row["selected"]) == (16, ["vendor:acme"], "vendor.acme")
    assert {c["impl_id"]: c["status"] for c in row["candidates"]} == {
        "vendor.acme": "selected",
        "stock.vllm": "eligible",
    }
    out = fl(*question, **variables).out
    assert "at most 16 tokens: vendor.acme\norder vendor:acme\n" in out
    assert "more tokens: stock.vllm\norder reference | stock\n" in out
    # No list, no rows.
    (plain,) = fl(*question, "--json").json()["modes"]
    assert plain["rows"] == []
    # A row without a usable implementation is a finding: a script would fail there.
    assert fl("explain", "silu_and_mul", "--script", **variables).status == 1


def test_an_op_without_anything_is_a_finding(fl: Command, plugin: Plugin) -> None:
    plugin()
    done = fl("explain", "rms_norm", "--script")
    assert done.status == 1
    assert "pip install" in done.out
    assert fl("explain", "rms_norm", "--mode", "eager").status == 0  # vLLM's path


def test_an_op_of_a_plugin_without_a_contract(fl: Command, plugin: Plugin) -> None:
    plugin(
        """
        def wiggle(x):
            return x

        @hookimpl
        def register_ops():
            return [vendor("acme", wiggle)]
        """
    )
    done = fl("explain", "wiggle")
    assert done.status == 0
    assert "no contract" in done.out
    assert "Only scripts can call it" in done.out
    assert "In an engine" not in done.out  # as in the kit: an engine has no target for it
    assert [v["mode"] for v in fl("explain", "wiggle", "--json").json()["modes"]] == ["script"]
    done = fl("explain", "wiggle", "--mode", "eager")
    assert (done.status, done.out) == (2, "")
    assert "no engine runs it" in done.err
    assert "wriggle" in fl("explain", "wriggle", "--mode", "eager").err
    assert fl("explain", "wiggle", "--json").json()["signature"] is None


def test_a_whole_layer_of_vllms(fl: Command, plugin: Plugin) -> None:
    plugin(
        """
        from vllm_fl import LayerImpl

        @hookimpl
        def layers():
            yield LayerImpl("RowParallelLinear", "a.Row", BackendImplKind.VENDOR, "acme")
        """
    )
    done = fl("explain", "RowParallelLinear", "--json")
    answer = done.json()
    assert (done.status, answer["signature"]) == (0, None)
    assert [view["mode"] for view in answer["modes"]] == ["eager", "compiled"]
    for view in answer["modes"]:
        assert view["selected"] == "vendor.acme"
        assert [c["impl_id"] for c in view["candidates"]] == ["vendor.acme", "stock.vllm"]
    shown = fl("explain", "RowParallelLinear").out
    assert "a whole layer class of vLLM" in shown and "which is not verified" in shown
    orders = {"VLLM_FL_PER_OP": "RowParallelLinear=stock"}
    left = fl("explain", "RowParallelLinear", "--mode", "eager", "--json", **orders).json()
    assert left["modes"][0]["selected"] == "stock.vllm"
    assert fl("plan", "--json").json()["plan"]["ops"]["RowParallelLinear"]["impl"] == "vendor.acme"
    assert "RowParallelLinear" not in fl("explain", "rms_norm").out
