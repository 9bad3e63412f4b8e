"""`vllm-fl report --flashinfer-bench`, read by FlashInfer-Bench's own models of data."""

from __future__ import annotations

import dataclasses
import math
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tables
import torch
from commands import Command

from vllm_fl.contracts import contracts
from vllm_fl.engine.identity import contract_digest
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.settings.table import Figure, Table, TunedOp
from vllm_fl_ops.contracts.rules import typical_sizes
from vllm_fl_tools.cli import _flashinfer_bench as export
from vllm_fl_tools.cli._flashinfer_bench import Dataset

TOKENS = (1, 24)
TYPICAL = dataclasses.replace(
    typical_sizes(known_contracts().bindings.values()), tokens=TOKENS[-1:]
)
SIZES = {
    **{f.name: getattr(TYPICAL, f.name) for f in dataclasses.fields(TYPICAL)},
    **TYPICAL.more,
    "expert_intermediate": 64,
}
del SIZES["tokens"], SIZES["more"]
META = torch.device("meta")
SERVED = [
    name
    for name, spec in contracts().items()
    if "bfloat16" in spec.dtypes and [*spec.served(TYPICAL, torch.bfloat16, META)]
]


@pytest.fixture(scope="module")
def fib() -> Any:
    """FlashInfer-Bench's models of data."""
    if find_spec("flashinfer_bench") is None:
        pytest.skip("flashinfer-bench is not installed; tools/envs.py has it in `report`")
    if find_spec("vllm") is None:
        pytest.skip("flashinfer-bench imports what vLLM brings, and vLLM is not installed")
    return import_module("flashinfer_bench.data")


def tuned(*names: str, **fields: Any) -> Table:
    """A table of these ops, by the contracts that are here."""
    whole = tables.table(names, sizes=SIZES, **fields)
    ops = {
        name: dataclasses.replace(
            tables.tuned(tables.random.Random(1), TOKENS),
            contract=contract_digest(contracts()[name]),
        )
        for name in whole.ops
    }
    return dataclasses.replace(whole, ops=ops)


def test_the_dataset_is_read_by_its_own_models(fl: Command, tmp_path: Path, fib: Any) -> None:
    path = tables.written(tmp_path / "t.json", tuned("rms_norm", "silu_and_mul"))
    done = fl("report", path, "--flashinfer-bench", str(tmp_path / "out"), "--json")
    told = done.json()["flashinfer_bench"]
    assert (done.status, told["definitions"], told["left_out"]) == (0, 5, [])
    found = fib.TraceSet.from_path(str(tmp_path / "out"))
    assert len(found.definitions) == 5
    by_op = {name.partition("_of_")[0]: d.op_type for name, d in found.definitions.items()}
    assert {*by_op.values()} == {"rms_norm", "silu_and_mul"}
    assert found.summary()["total"] == told["traces"] == 2 * len(TOKENS) * len(tables.IMPLS)
    (silu,) = (d for d in found.definitions.values() if d.op_type == "silu_and_mul")
    assert silu.var_axes == ["tokens"] and silu.const_axes["intermediate"] == 3072
    for trace in found.traces[silu.name]:
        assert trace.evaluation.environment.hardware == "NVIDIA H200"
        assert trace.evaluation.environment.libs["driver"] == "580.95.05"
        assert trace.workload.axes["tokens"] in TOKENS
        assert {*trace.workload.inputs} == {*silu.inputs}


def test_traces_have_the_figures(fib: Any) -> None:
    figures = (
        Figure(16, "stock", 10.0, 9.5, 10.5, 40),
        Figure(16, "vendor.fast", 8.0, 7.5, 8.5, 40, 1.26, 1.24),
        Figure(16, "vendor.bad", rejected=tables.WRONG),
        Figure(16, "vendor.picky", rejected="refused: no bfloat16"),
        Figure(16, "vendor.lost"),
    )
    op = TunedOp(contract_digest(contracts()["relu2"]), "stock", (), figures)
    dataset = Dataset()
    dataset.add(tables.table({"relu2": op}, sizes=SIZES), contracts())
    ((name, lines),) = dataset.traces.items()
    traces = {
        line["solution"].removeprefix(f"{name}-"): fib.Trace.model_validate(line).evaluation
        for line in lines
    }
    assert {impl: trace.status.value for impl, trace in traces.items()} == {
        "stock": "PASSED",
        "vendor.fast": "PASSED",
        "vendor.bad": "INCORRECT_NUMERICAL",
        "vendor.picky": "RUNTIME_ERROR",
    }
    fast = traces["vendor.fast"].performance
    assert (fast.latency_ms, fast.reference_latency_ms, fast.speedup_factor) == (0.008, 0.01, 1.26)
    assert traces["stock"].performance.speedup_factor == 1.0
    assert traces["vendor.bad"].log == tables.WRONG and traces["vendor.bad"].performance is None
    assert math.isnan(traces["stock"].correctness.max_absolute_error), "a table does not hold it"
    assert traces["stock"].timestamp == "2026-11-22T12:00:00+00:00"


@pytest.mark.parametrize("op", SERVED)
def test_the_reference_is_the_oracle(op: str, fib: Any) -> None:
    """Its source alone, run on the calls of a model, gives the oracle's results, rounded."""
    spec = contracts()[op]
    calls = export.definitions(spec, SIZES, "bfloat16", TOKENS[-1])
    model = dataclasses.replace(TYPICAL, more={**TYPICAL.more, "expert_intermediate": 64})
    samples = list(spec.served(model, torch.bfloat16, torch.device("cpu")))
    assert len(calls) == len(samples) > 0
    results = []
    inputs = []
    for call, sample in zip(calls, samples, strict=True):
        definition = fib.Definition.model_validate(call)
        tensors = [arg for arg in sample.args if isinstance(arg, torch.Tensor)]
        assert [t.dtype for t in tensors] == definition.torch_input_dtypes
        axes = definition.get_axes_values_from_inputs(tensors)
        assert axes == {"tokens": TOKENS[-1]}
        assert definition.get_input_shapes(axes) == [[*t.shape] for t in tensors]
        got = parts(execute(call)(*tensors))
        assert [[*t.shape] for t in got] == definition.get_output_shapes(axes)
        wanted = parts(spec.oracle(*sample.args))
        for one, exact, named in zip(got, wanted, definition.outputs.values(), strict=True):
            assert str(one.dtype) == f"torch.{named.dtype.value}"
            near = exact.to(one.dtype)
            assert torch.equal(one.double().nan_to_num(), near.double().nan_to_num())
        results += got
        inputs += tensors
    if len(calls) > 1:
        whole = export._together(spec, calls)
        fib.Definition.model_validate(whole)
        together = execute(whole)(*inputs)
        assert len(together) == len(results)
        assert all(
            torch.equal(a.double().nan_to_num(), b.double().nan_to_num())
            for a, b in zip(together, results, strict=True)
        )


def parts(results: Any) -> list[torch.Tensor]:
    return [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]


def execute(definition: dict[str, Any]) -> Any:
    """The `run` of its reference, which needs torch and no module of ours."""
    source = definition["reference"]
    assert "vllm_fl" not in [line.split()[1].partition(".")[0] for line in source.splitlines()
                             if line.startswith(("import ", "from "))]  # fmt: skip
    names: dict[str, Any] = {}
    exec(compile(source, definition["name"], "exec"), names)
    return names["run"]


def test_an_oracle_without_a_source_of_its_own_is_imported_or_left_out() -> None:
    def made(spec: Any) -> str:
        return export._reference(spec, ["x"], ["x"], ["float32"])

    relu = contracts()["relu2"]
    opaque = dataclasses.replace(relu, oracle=uses_an_object)
    assert f"from {__name__} import uses_an_object" in made(opaque)
    hidden = 2

    def closure(x: torch.Tensor) -> torch.Tensor:
        return x * hidden

    with pytest.raises(export.Unsayable, match="source cannot be had"):
        made(dataclasses.replace(relu, oracle=closure))


def test_a_size_that_is_no_axis_is_left_out() -> None:
    """As many places as whole blocks of rows need."""
    spec = contracts()["moe_align_block_size"]
    with pytest.raises(export.Unsayable, match=r"result_1 has a size .* no axis"):
        export.definitions(spec, SIZES, spec.dtypes[0], TOKENS[-1])


SOMETHING = object()


def uses_an_object(x: torch.Tensor) -> torch.Tensor:
    return x if SOMETHING else -x


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ops": {"no_such_op": TunedOp("0", "stock", ())}}, "no contract of this name"),
        ({"ops": {"relu2": TunedOp("0", "stock", ())}}, "another version of its contract"),
        ({"dtype": "float8_e5m2"}, "its contract has no float8_e5m2"),
        ({"sizes": {}}, "no call of a model of these sizes"),
    ],
)
def test_what_cannot_be_said_is_left_out_with_its_reason(
    change: dict[str, Any], reason: str, fl: Command, tmp_path: Path
) -> None:
    path = tables.written(tmp_path / "t.json", dataclasses.replace(tuned("relu2"), **change))
    done = fl("report", path, "--flashinfer-bench", str(tmp_path / "out"))
    assert done.status == 0 and "0 Definitions, 0 Traces" in done.out
    assert "left out: " in done.out and reason in done.out


def test_other_sizes_are_another_definition() -> None:
    dataset = Dataset()
    for hidden in (1024, 2048, 2048):
        dataset.add(
            dataclasses.replace(tuned("layer_norm"), sizes={**SIZES, "hidden": hidden}), contracts()
        )
    assert len(dataset.definitions) == 2
    assert sorted(len(lines) for lines in dataset.traces.values()) == [8, 16]
    shapes = {d["axes"]["tokens"]["type"] for d in dataset.definitions.values()}
    assert shapes == {"var"}


def test_nothing_is_written_over(fl: Command, tmp_path: Path) -> None:
    path = tables.written(tmp_path / "t.json", tuned("relu2"))
    out = tmp_path / "out"
    out.mkdir()
    assert fl("report", path, "--flashinfer-bench", str(out)).status == 0, "an empty folder will do"
    before = sorted(out.rglob("*"))
    page = tmp_path / "page.html"
    done = fl("report", path, "--flashinfer-bench", str(out), "--html", str(page))
    assert done.status == 2 and "no empty folder" in done.err
    assert sorted(out.rglob("*")) == before and not page.exists()
    assert {p.name for p in tmp_path.iterdir()} == {"t.json", "out"}
    done = fl("report", path, "--flashinfer-bench", str(tmp_path / "none" / "out"))
    assert done.status == 2 and "cannot be written" in done.err


def test_it_is_said_where_the_report_goes(fl: Command, tmp_path: Path) -> None:
    path = tables.written(tmp_path / "t.json", tuned("relu2"))
    done = fl("report", path)
    assert done.status == 2 and "--html OUT" in done.err
