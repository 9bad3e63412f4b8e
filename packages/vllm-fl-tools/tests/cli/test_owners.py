"""Whose a step's time is, by profiles that were recorded, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from profiles import (
    FUSED_NORM,
    LINEAR,
    NORM,
    NORM_OP,
    learnt,
    measured,
    on_host,
    places,
    report,
)

from vllm_fl_tools.cli._coverage import Owner, Whose, attribute


def whose(tokens: int = 1, plan: dict[str, Any] | None = None, **fields: Any) -> Whose:
    return Whose(places(**fields), plan or report(), tokens)


def owner(*path: str, **fields: Any) -> Owner:
    return whose(**fields).of(path)


def rows(phase: dict[str, Any]) -> dict[tuple[str, str], tuple[float, float]]:
    """(op or name, implementation) -> (µs, calls) of a step."""
    return {(r["op"] or r["name"], r["impl"]): (r["us"], r["calls"]) for r in phase["rows"]}


def test_an_implementation_owns_what_it_calls() -> None:
    """vLLM's operator inside it, which a binding names, is its own time."""
    found = owner(NORM, NORM_OP, "_C::rms_norm", "aten::empty")
    assert found == Owner("rms_norm", "vendor.cpu", "", "yes")


def test_no_time_is_counted_twice_and_a_call_is_one_of_the_op() -> None:
    seen = on_host(
        (4.0, 6, (NORM,)),
        (2.0, 6, (NORM, NORM_OP)),
        (6.0, 6, (NORM, NORM_OP, "aten::empty")),
        (20.0, 6, (NORM, NORM_OP, "_C::rms_norm")),
        (60.0, 2, (LINEAR, "aten::linear")),
        (10.0, 2, (LINEAR, "aten::linear", "_C::onednn_mm")),
        (2.0, 1, ("## Call CompiledFxGraph 0123 ##",)),
    )
    found = attribute(whose(), seen, None)
    assert rows(found) == {
        ("aten::linear", "stock"): (35.0, 1.0),
        ("rms_norm", "vendor.cpu"): (14.0, 3.0),
    }
    # What only labels and the compiler's own code took is the host's, and so in no row.
    assert found["total_us"] == found["busy_us"] == 49.0 and found["profiled_us"] == 100.0
    assert [row["share"] for row in found["rows"]] == pytest.approx([35 / 49, 14 / 49])
    assert found["rows"][1]["kernels"] == {
        "_C::rms_norm": 10.0,
        "aten::empty": 3.0,
        NORM_OP: 1.0,
    }


def test_vllms_code_for_an_op() -> None:
    assert owner("_C::silu_and_mul") == Owner("silu_and_mul", "stock", "", "no", "planned")
    assert owner("vllm-fl/layer/Rope", "aten::mul").why == "planned"
    planned = report(rope={"impl": "vendor.cpu", "reason": "the order says vendor"})
    found = owner("vllm-fl/layer/Rope", "aten::mul", plan=planned)
    assert found.why == "vendor.cpu is planned: see `vllm-fl explain rope`"
    theirs = report(silu_and_mul={"impl": "foreign", "reason": "layer SiluAndMul is acme.Silu"})
    assert owner("vllm-fl/layer/SiluAndMul", "_C::silu_and_mul", plan=theirs).why == "planned"
    for own in ("stock.vllm", "foreign.oot"):
        last = owner(NORM, f"vllm-fl/op/rms_norm/{own}", "aten::mul")
        assert (last.op, last.impl, last.reached) == ("rms_norm", "stock", "no")


def test_code_without_a_contract() -> None:
    assert owner(LINEAR, "_C::onednn_mm") == Owner(
        "", "stock", "_C::onednn_mm", "no", "no contract (in QKVParallelLinear)"
    )
    assert "outside of layers" in owner("aten::copy_").why


def test_an_order_by_size_applies_to_the_tokens_of_the_step() -> None:
    rows = [{"up_to": 16, "impl": "stock", "reason": "table t"}]
    by_size = report(silu_and_mul={"impl": "vendor.cpu", "reason": "table", "rows": rows})
    path = ("vllm-fl/layer/SiluAndMul", "_C::silu_and_mul")
    assert owner(*path, plan=by_size, tokens=16).why == "planned"
    assert "vendor.cpu is planned" in owner(*path, plan=by_size, tokens=17).why


def test_attention_is_its_backend_s_and_cache_writes_are_their_op_s() -> None:
    inside = ("vllm-fl/layer/Attention", "vllm::unified_attention_with_output")
    assert owner(*inside, "_C::cpu_attention_with_kv_cache") == Owner(
        "attention_backend", "stock", "CPU_ATTN", "no", "planned"
    )
    ours = report(attention_backend={"impl": "vendor.attn", "reason": "the order says vendor"})
    assert owner(*inside, plan=ours).reached == "yes"
    caches = {"_C_cache_ops::reshape_and_cache_flash": "reshape_and_cache"}
    write = owner(*inside, "_C_cache_ops::reshape_and_cache_flash", operators=caches)
    assert write.op == "reshape_and_cache"


def test_what_is_fused_is_shown_under_the_kernel() -> None:
    path = ("## Call CompiledFxGraph 0123 ##", FUSED_NORM)
    assert owner(*path) == Owner("fused: rms_norm", "vendor.cpu", "", "yes")
    both = {FUSED_NORM: ["SiluAndMul", "RMSNorm", "LlamaDecoderLayer"]}
    found = owner(*path, kernels=both)
    assert (found.op, found.impl) == ("fused: rms_norm, silu_and_mul", "vendor.cpu, stock")
    assert found.reached == "partly" and found.name == "with LlamaDecoderLayer"
    assert found.why == "silu_and_mul: planned"
    # A pass of ours has put code into the graph of some sizes, whatever the plan says of others.
    assert owner(*path, kernels={FUSED_NORM: ["silu_and_mul/vendor.acme"]}) == Owner(
        "fused: silu_and_mul", "vendor.acme", "", "yes"
    )
    stock = owner(*path, kernels={FUSED_NORM: ["silu_and_mul/stock.vllm"]})
    assert (stock.impl, stock.reached) == ("stock", "no")
    assert owner(*path, kernels={FUSED_NORM: ["Embedding"]}).name == "fused: Embedding"
    unknown = owner("triton_red_fused_add_0", kernels={})
    assert unknown.reached == "?" and "unknown" in unknown.why


def test_kernels_in_a_captured_graph_have_the_owners_that_they_had_without_it() -> None:
    """The n-th call of a kernel in a step is whose its n-th call was: one name, two owners."""
    seen = learnt(
        ("gemm", (LINEAR, "aten::linear", "aten::mm")),
        ("elementwise", (NORM, NORM_OP, "aten::mul")),
        ("elementwise", (LINEAR, "aten::add")),
        ("rms", ("vllm_fl::rms_norm_vendor_cpu_0123",)),
    )
    times = measured(
        60.0, gemm=[10.0, 12.0], elementwise=[1.0, 2.0, 3.0, 4.0], rms=[5.0, 5.0], steps=2
    )
    found = attribute(whose(), seen, times)
    assert rows(found) == {
        ("linear", "stock"): (11.0, 1.0),
        ("rms_norm", "vendor.cpu"): (7.0, 2.0),  # of elementwise the first of two, and its own
        ("aten::add", "stock"): (3.0, 1.0),
    }
    assert found["total_us"] == 21.0 and found["busy_us"] == 30.0


def test_what_cannot_be_told_is_called_unattributed() -> None:
    seen = learnt(("elementwise", (NORM, NORM_OP)), ("elementwise", (LINEAR, "aten::add")))
    times = measured(9.0, elementwise=[1.0, 2.0, 3.0], graph_only=[3.0], steps=1)
    times["kernels"]["Memcpy HtoD (Pageable -> Device)"] = [2.0]
    found = {row["why"]: row for row in attribute(whose(), seen, times)["rows"]}
    assert {row["reached"] for row in found.values()} == {"?", "no"}
    not_as_often = next(row for why, row in found.items() if "not as often" in why)
    assert not_as_often["why"].startswith("launched by rms_norm, aten::add;")
    assert not_as_often["us"] == 6.0
    assert found["steps without graphs launched no such kernel"]["us"] == 3.0
    assert found["no contract: a copy"]["name"] == "Memcpy HtoD"


def test_a_launch_whose_caller_is_not_known_is_whose_the_others_of_its_kernel_are() -> None:
    """As seen on an H100: of some launches of attention's kernel the profiler knew no operator."""
    kernel = "void cutlass::device_kernel<flash::FlashAttnFwdSm90<cute::tuple<cute::C<1> > > >()"
    seen = learnt(
        (kernel, ()),
        (kernel, ("vllm::unified_attention_with_output",)),
        ("gemm", ("cudaLaunchKernelExC",)),
    )
    found = attribute(whose(), seen, measured(9.0, **{kernel: [4.0, 4.0], "gemm": [1.0]}, steps=1))
    assert rows(found) == {
        ("attention_backend", "stock"): (8.0, 2.0),
        ("unattributed", ""): (1.0, 1.0),
    }


@pytest.mark.parametrize(
    ("seen", "times", "problem"),
    [
        (on_host(steps=0), None, "the engine took no such step"),
        (on_host(), None, "saw no operator"),
        (learnt(), measured(0.0), "saw no kernel of the device"),
        ({"problem": "it failed", "steps": 0}, None, "it failed"),
    ],
)
def test_a_profile_without_anything_says_what_is_missing(
    seen: dict[str, Any], times: dict[str, Any] | None, problem: str
) -> None:
    found = attribute(whose(), seen, times)
    assert problem in found["problem"] and not found["rows"]
