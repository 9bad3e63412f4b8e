"""Operators for a vLLM without any: the ones that an engine needs are defined. The installed vLLM
may have compiled ones, so most tests define operators of another library, from a separate table.
The table of the releases is tested separately."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import engine_of, half, plan_of, refusing, silu, silu_kernel, silu_of_kernel, taking
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_fl.contracts.binding import Binding, OperatorTarget
from vllm_fl.engine.plan import Plan
from vllm_fl.errors import AllFailedError, NoKernelError, VllmFLError
from vllm_fl.integration.compat import OLDEST, TOO_NEW, vllm_version
from vllm_fl.integration.engines import calling
from vllm_fl.integration.patchers import missing_operators, operators
from vllm_fl.integration.patchers.process_wide import Choice
from vllm_fl.integration.targets import targets
from vllm_fl.plugins.registry import known_contracts

PATCHER, CPU = operators.Operators(), torch.device("cpu")

X = torch.arange(32.0).reshape(4, 8)

RELEASE = ".".join(vllm_version().split(".")[:2])

TABLE = [
    {"schema": "fl_test_bare::gated(Tensor! out, Tensor input) -> ()", "read": True},
    {"schema": "fl_test_bare::wider(Tensor! out, Tensor input, float a=1.0) -> ()", "read": False},
    {"schema": "fl_test_bare::odd(Tensor input, Tensor! out) -> ()", "read": False},
    {"schema": "fl_test_bare::unowned(Tensor! result, Tensor input) -> ()", "read": True},
]


@contextmanager
def bare_vllm(first: str = RELEASE, last: str = RELEASE) -> Iterator[pytest.MonkeyPatch]:
    """A vLLM without compiled operators; its releases from `first` to `last` have `TABLE`."""
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json") as file,
        pytest.MonkeyPatch.context() as patch,
    ):
        json.dump({"operators": [{**e, "first": first, "last": last} for e in TABLE]}, file)
        file.flush()
        patch.setattr(missing_operators, "TABLE", Path(file.name))
        patch.setattr(missing_operators, "compiled_files", tuple)
        patch.setattr(missing_operators, "installed_bindings", binding)
        missing_operators._table.cache_clear()
        try:
            yield patch
        finally:
            for name in [n for n in missing_operators._libraries if n.startswith("fl_test_bare::")]:
                missing_operators._libraries.pop(name)._destroy()
            missing_operators._table.cache_clear()


@pytest.fixture
def bare() -> Iterator[None]:
    with bare_vllm():
        yield


def names() -> set[str]:
    """The operators of the tests' library that torch has."""
    found = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fl_test_bare::")}
    short = {name.partition("::")[2] for name in found}
    for entry in TABLE:
        name = str(entry["schema"]).partition("::")[2].partition("(")[0]
        assert hasattr(torch.ops.fl_test_bare, name) == (name in short), name
    return short


def target(name: str = "gated") -> OperatorTarget:
    return OperatorTarget(f"fl_test_bare::{name}", ("out", "input"), silu_kernel, silu_of_kernel)


def binding(*found: OperatorTarget) -> dict[str, Binding]:
    return {"silu_and_mul": Binding(found or (target(),))}


def call(name: str = "gated", *further: Any) -> Tensor:
    out = torch.full((4, 4), -1.0)
    getattr(torch.ops.fl_test_bare, name)(out, X, *further)
    return out


FIRST = half(X)


def engine(plan: Plan, *found: OperatorTarget) -> AbstractContextManager[Choice]:
    return taking(plan, binding(*found), operators.Operators())


def test_an_operator_is_there_from_an_engine_on_that_has_an_implementation_of_it(
    bare: None,
) -> None:
    assert names() == set()
    plan = plan_of(silu("vendor.a", 10.0), counts_calls=True)
    with engine(plan) as chosen:
        assert names() == {"gated"}
        assert torch.equal(call(), FIRST + 10)
        assert chosen.names == {"silu_and_mul": ["fl_test_bare::gated"]}
        assert chosen.defined == {"fl_test_bare::gated": TABLE[0]["schema"]}
        (reported,) = PATCHER.report_targets(engine_of(plan), chosen)["silu_and_mul"].values()
        assert reported == {
            "replaced": None,
            "overridden_by": None,
            "without_engine": 0,
            "other_arguments": 0,
        }
    assert plan.calls == {("silu_and_mul", "vendor.a"): 1}
    with pytest.raises(NoKernelError):
        call()
    with engine(plan_of(silu("vendor.b", 2.0))):
        assert torch.equal(call(), FIRST + 2)


@pytest.mark.parametrize("reason", ["compiled", "brought", "release"])
def test_only_an_empty_build_of_a_known_release_is_given_operators(reason: str) -> None:
    wanted = ("9.0", "9.1") if reason == "release" else (RELEASE, RELEASE)
    with bare_vllm(*wanted) as patch:
        if reason == "compiled":
            patch.setattr(missing_operators, "compiled_files", lambda: ("_C.abi3.so",))
        library = torch.library.Library("fl_test_bare", "FRAGMENT")
        if reason == "brought":
            library.define("another(Tensor x) -> Tensor")
        try:
            with engine(plan_of(silu("vendor.a"), mode="compiled")) as chosen:
                assert chosen.defined == {}
                assert chosen.left["silu_and_mul"] == {
                    "fl_test_bare::gated": "this vLLM has no such operator"
                }
        finally:
            library._destroy()


def test_a_call_with_other_arguments_or_without_an_engine_raises_by_name(bare: None) -> None:
    plan = plan_of(silu("vendor.a", 1.0))
    with engine(plan, target("wider")) as chosen:
        with pytest.raises(NoKernelError) as failure:
            call("wider", 2.0)
        (reported,) = PATCHER.report_targets(engine_of(plan), chosen)["silu_and_mul"].values()
    assert failure.value.operator == "fl_test_bare::wider"
    assert reported["other_arguments"] == 1
    with engine(plan), calling(None), pytest.raises(NoKernelError) as failure:
        call()
    error = failure.value
    assert isinstance(error, VllmFLError) and isinstance(error, NotImplementedError)
    assert (error.operator, error.op) == ("fl_test_bare::gated", "silu_and_mul")
    for part in (error.operator, vllm_version(), "empty build", "Install vLLM", "explain silu_and"):
        assert part in str(error)


def test_where_every_implementation_refuses_the_error_names_the_operator_too(bare: None) -> None:
    plan = plan_of(refusing("vendor.a", "no"), refusing("vendor.b", "nor I"))
    with engine(plan), pytest.raises(AllFailedError) as failure:
        call()
    tried = [impl for impl, _ in failure.value.causes]
    assert tried == ["vendor.a", "vendor.b", "stock.vllm"]
    assert "fl_test_bare::gated" in str(failure.value) and "empty build" in str(failure.value)
    assert not plan.record.demotions
    with engine(plan_of(refusing("vendor.a", "no"), silu("vendor.b", 5.0))):
        assert torch.equal(call(), FIRST + 5)


def test_in_compiled_mode_what_vllm_reads_is_there_too_and_raises_by_name(bare: None) -> None:
    with engine(plan_of(mode="compiled")) as chosen:
        assert names() == {"gated", "unowned"} and chosen.names == {}
        assert set(chosen.defined) == {"fl_test_bare::gated", "fl_test_bare::unowned"}
        assert torch.ops.fl_test_bare.unowned.default  # as vLLM's pass reads it
        with pytest.raises(NoKernelError) as failure:
            call("unowned")
        assert failure.value.operator == "fl_test_bare::unowned" and failure.value.op is None
        assert "disable the feature that calls it" in str(failure.value)
        with pytest.raises(NoKernelError, match="explain silu_and_mul"):
            call("gated")


def test_neither_report_nor_digest_depends_on_who_came_first(bare: None) -> None:
    other = plan_of(silu("vendor.b", 2.0), mode="compiled")
    with engine(plan_of(silu("vendor.a", 1.0))), engine(other) as second:
        pass
    with engine(other) as alone:
        assert alone == second


def test_it_returns_nothing_on_tensors_without_data(bare: None) -> None:
    with engine(plan_of(silu("vendor.a"))):
        out, x = torch.empty(4, 4, device="meta"), torch.empty(4, 8, device="meta")
        assert torch.ops.fl_test_bare.gated(out, x) is None
        with FakeTensorMode() as mode:
            fakes = mode.from_tensor(torch.empty(4, 4)), mode.from_tensor(X)
            assert torch.ops.fl_test_bare.gated(*fakes) is None


# The table of the releases.

ENTRIES: list[dict[str, Any]] = json.loads(missing_operators.TABLE.read_text())["operators"]

CPU_BUILDS_ALONE = {
    "_C::causal_conv1d_update_cpu_vec",
    "_C::chunk_gated_delta_rule_cpu",
    "_C::concat_and_cache_mla_cpu",
    "_C::cpu_fused_moe",
    "_C::fused_gdn_gating_cpu",
    "_C::fused_sigmoid_gating_delta_rule_update_cpu",
    "_C::prepack_moe_weight",
}
"""Operators that no CUDA build has; an empty build does not get them either."""

RELEASES = [f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], TOO_NEW[1])]


@pytest.mark.parametrize("release", RELEASES)
def test_the_table_has_each_operator_of_cores_bindings_in_every_release(release: str) -> None:
    known = missing_operators._table(f"{release}.7+empty")
    fitting: set[str] = set()
    bound = [
        p
        for _, p in targets(known_contracts().bindings, OperatorTarget)
        if p.name not in CPU_BUILDS_ALONE
    ]
    for found in bound:
        parameters = [a.name for a in torch._C.parse_schema(known[found.name][0]).arguments]
        if tuple(parameters[: len(found.parameters)]) == found.parameters:
            fitting.add(found.name)
    assert fitting == {found.name for found in bound} and not CPU_BUILDS_ALONE & set(known)
    assert any(is_read for _, is_read in known.values())
    covered = [e for e in ENTRIES if float(e["first"]) <= float(release) <= float(e["last"])]
    assert len(covered) == len(known), "one schema each"


def test_a_release_beside_those_of_the_table_has_nothing() -> None:
    for version in ("0.25.3", "0.34.0", "0.1.dev1+g0123abc", "unknown"):
        assert not missing_operators._table(version)


OTHERWISE_ON_CPUS = {
    "_C::dynamic_scaled_int8_quant": {"result": "out"},
    "_C::static_scaled_int8_quant": {"result": "out"},
    "_C::silu_and_mul": {"result": "out"},
    "_C::rms_norm": {"result": "out"},
}
"""Parameters with another name in vLLM's CPU build than in its CUDA build."""


@pytest.mark.skipif(
    not missing_operators.compiled_files(), reason="this vLLM has no compiled operators"
)
def test_the_table_says_what_the_installed_build_says() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    compared: dict[str, str] = {}
    for name, (text, _) in missing_operators._table(vllm_version()).items():
        there = operators._schema(name)
        if there is None or not there.arguments:  # a name that a build reserves for a later release
            continue
        table = torch._C.parse_schema(text)
        for ours, theirs in zip(table.arguments, there.arguments, strict=True):
            renamed = OTHERWISE_ON_CPUS.get(name, {}).get(ours.name, ours.name)
            assert renamed == theirs.name, name
            assert str(ours.type) == str(theirs.type), (name, ours.name)
            assert ours.has_default_value() == theirs.has_default_value(), (name, ours.name)
            assert ours.default_value == theirs.default_value, (name, ours.name)
            assert (ours.alias_info is None) == (theirs.alias_info is None), (name, ours.name)
        compared[name] = text
    named = {
        found.name for _, found in targets(known_contracts().bindings, OperatorTarget)
    } - CPU_BUILDS_ALONE
    there = {name: operators._schema(name) for name in named}
    assert compared and {n for n, schema in there.items() if schema and schema.arguments} <= set(
        compared
    )
