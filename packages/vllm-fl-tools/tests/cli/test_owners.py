"""Owners of a step's time, from recorded profiles, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from profiles import FUSED_NORM, LINEAR, NORM, NORM_OP, on_device, on_host, places, report

from vllm_fl_tools.cli._coverage import CodeOwner, OwnerFinder, answers, attribute


def finder(tokens: int = 1, plan: dict[str, Any] | None = None, **fields: Any) -> OwnerFinder:
    return OwnerFinder(places(**fields), plan or report(), tokens)


def owner(*path: str, **fields: Any) -> CodeOwner:
    return finder(**fields).of(path)


def rows(phase: dict[str, Any]) -> dict[tuple[str, str], tuple[float, float]]:
    """(op or name, implementation) -> (µs, calls) of a step."""
    return {(r["op"] or r["name"], r["impl"]): (r["us"], r["calls"]) for r in phase["rows"]}


def test_an_implementation_owns_what_it_calls() -> None:
    """A vLLM operator inside it, although a binding has it, is part of its time."""
    found = owner(NORM, NORM_OP, "_C::rms_norm", "aten::empty")
    assert found == CodeOwner("rms_norm", "vendor.cpu", "", "yes")


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
    found = attribute(finder(), seen, on_host=True)
    assert rows(found) == {
        ("aten::linear in QKVParallelLinear", "stock"): (35.0, 1.0),
        ("rms_norm", "vendor.cpu"): (14.0, 3.0),
    }
    # Labels and the compiler's code only take host time, so they are in no row.
    assert found["total_us"] == found["busy_us"] == 49.0
    assert [row["share"] for row in found["rows"]] == pytest.approx([35 / 49, 14 / 49])
    assert found["rows"][1]["kernels"] == {"_C::rms_norm": 10.0, "aten::empty": 3.0, NORM_OP: 1.0}


def test_vllms_code_for_an_op() -> None:
    assert owner("_C::silu_and_mul") == CodeOwner("silu_and_mul", "stock", "", "no")
    assert owner("vllm-fl/layer/Rope", "aten::mul") == CodeOwner("rope", "stock", "", "no")
    for own in ("stock.vllm", "foreign.oot"):
        last = owner(NORM, f"vllm-fl/op/rms_norm/{own}", "aten::mul")
        assert (last.op, last.impl, last.reached) == ("rms_norm", "stock", "no")


def test_code_without_a_contract() -> None:
    assert owner(LINEAR, "_C::onednn_mm") == CodeOwner(
        "", "stock", "_C::onednn_mm in QKVParallelLinear", "no"
    )
    assert owner("aten::copy_").name == "aten::copy_ outside of layers"


def test_a_contract_may_cover_code_that_no_implementation_can_run_here() -> None:
    """A product of a layer on vLLM's CPU platform is no code without a contract."""
    there = {"products": {"QKVParallelLinear": "linear"}, "not_covered": {"linear": ["eager mode"]}}
    plan = report()
    del plan["ops"]["linear"]
    seen = on_host(
        (60.0, 2, (LINEAR, "_C::onednn_mm")),
        (10.0, 2, (LINEAR, "aten::copy_")),
        (10.0, 2, ("_C::silu_and_mul",)),
        (20.0, 2, (NORM, NORM_OP)),
    )
    found = attribute(finder(plan=plan, **there), seen, on_host=True)
    assert found["coverage"] == pytest.approx(
        {"not here": 0.6, "runs": 0.2, "could run": 0.1, "no contract": 0.1}
    )
    first, *more = answers(found)
    assert first.startswith("Implementations run 20.0% of the operators' time and could run 10.0%")
    assert more == [
        "Not here: linear 60.0%: not covered: eager mode.",
        "Could run: silu_and_mul 10.0%: the order lists stock.",
        "No contract: 10.0%, in the rows without an op.",
    ]
    assert answers({**found, "coverage": {}}) == []


def test_an_order_by_size_applies_to_the_tokens_of_the_step() -> None:
    rows = [{"up_to": 16, "impl": "stock", "reason": "table t"}]
    by_size = report(silu_and_mul={"impl": "vendor.cpu", "reason": "table", "rows": rows})
    path, kernels = ("triton_poi_fused_0",), {"triton_poi_fused_0": ["SiluAndMul"]}
    assert owner(*path, plan=by_size, tokens=16, kernels=kernels).impl == "stock"
    assert owner(*path, plan=by_size, tokens=17, kernels=kernels).impl == "vendor.cpu"


def test_attention_is_its_backend_s_and_cache_writes_are_their_op_s() -> None:
    inside = ("vllm-fl/layer/Attention", "vllm::unified_attention_with_output")
    assert owner(*inside, "_C::cpu_attention_with_kv_cache") == CodeOwner(
        "attention_backend", "stock", "CPU_ATTN", "no"
    )
    ours = report(attention_backend={"impl": "vendor.attn", "reason": "the order lists vendor"})
    assert owner(*inside, plan=ours).reached == "yes"
    caches = {"_C_cache_ops::reshape_and_cache_flash": "reshape_and_cache"}
    write = owner(*inside, "_C_cache_ops::reshape_and_cache_flash", operators=caches)
    assert write.op == "reshape_and_cache"


def test_what_is_fused_is_shown_under_the_kernel() -> None:
    path = ("## Call CompiledFxGraph 0123 ##", FUSED_NORM)
    assert owner(*path) == CodeOwner("fused: rms_norm", "vendor.cpu", "", "yes")
    both = {FUSED_NORM: ["SiluAndMul", "RMSNorm", "LlamaDecoderLayer"]}
    found = owner(*path, kernels=both)
    assert (found.op, found.impl) == ("fused: rms_norm, silu_and_mul", "vendor.cpu, stock")
    assert found.reached == "partly" and found.name == "with LlamaDecoderLayer"
    # Our pass has put code into the graph of some sizes, independent of the plan at other sizes.
    assert owner(*path, kernels={FUSED_NORM: ["silu_and_mul/vendor.acme"]}) == CodeOwner(
        "fused: silu_and_mul", "vendor.acme", "", "yes"
    )
    stock = owner(*path, kernels={FUSED_NORM: ["silu_and_mul/stock.vllm"]})
    assert (stock.impl, stock.reached) == ("stock", "no")
    assert owner(*path, kernels={FUSED_NORM: ["Embedding"]}).name == "fused: Embedding"
    unknown = owner("triton_red_fused_add_0", kernels={})
    assert unknown.reached == "?"


def test_kernels_have_the_owners_of_their_launches() -> None:
    seen = on_device(
        60.0,
        (22.0, 2, "gemm", (LINEAR, "aten::linear", "aten::mm")),
        (4.0, 2, "elementwise", (NORM, NORM_OP, "aten::mul")),
        (6.0, 2, "elementwise", (LINEAR, "aten::add")),
        (10.0, 2, "rms", ("vllm_fl::rms_norm_vendor_cpu_0123",)),
        steps=2,
    )
    found = attribute(finder(), seen, on_host=False)
    assert rows(found) == {
        ("linear", "stock"): (11.0, 1.0),
        ("rms_norm", "vendor.cpu"): (7.0, 2.0),
        ("aten::add in QKVParallelLinear", "stock"): (3.0, 1.0),
    }
    assert found["total_us"] == 21.0 and found["busy_us"] == 30.0


def test_a_launch_without_a_known_caller() -> None:
    """Seen on an H100: the profiler had no operator for some launches of attention's kernel."""
    kernel = "void cutlass::device_kernel<flash::FlashAttnFwdSm90<cute::tuple<cute::C<1> > > >()"
    seen = on_device(
        9.0,
        (4.0, 1, kernel, None),
        (4.0, 1, kernel, ("vllm::unified_attention_with_output",)),
        (1.0, 1, "gemm", ("cudaLaunchKernelExC",)),
        (2.0, 1, "Memcpy HtoD (Pageable -> Device)", None),
    )
    assert rows(attribute(finder(), seen, on_host=False)) == {
        ("attention_backend", "stock"): (8.0, 2.0),
        ("Memcpy HtoD", "stock"): (2.0, 1.0),
        ("unattributed", ""): (1.0, 1.0),
    }


@pytest.mark.parametrize(
    ("seen", "is_host", "problem"),
    [
        (on_host(steps=0), True, "the engine ran no such step"),
        (on_host(), True, "recorded no operator"),
        (on_device(0.0), False, "recorded no kernel of the device"),
        ({"problem": "it failed", "steps": 0}, True, "it failed"),
    ],
)
def test_a_profile_without_anything_says_what_is_missing(
    seen: dict[str, Any], is_host: bool, problem: str
) -> None:
    found = attribute(finder(), seen, on_host=is_host)
    assert problem in found["problem"] and not found["rows"]
