"""Targets of `fused_experts`: vLLM's calls become calls of the op, and back."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import engine_of, managing, planning
from of_acme import acme

pytest.importorskip("vllm", reason="vllm is not installed: there are no calls to take")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import override_forward_context
from vllm.platforms import current_platform

from vllm_fl.contracts.binding import FunctionTarget, OperatorTarget
from vllm_fl.errors import VllmFLError
from vllm_fl.integration.engines import calling
from vllm_fl.integration.patchers import operators
from vllm_fl.integration.patchers.process_wide import Choice
from vllm_fl.plugins.registry import known_contracts

SPEC = known_contracts().contracts["fused_experts"]
BINDING = known_contracts().bindings["fused_experts"]

TRITON, CHOICE = (target for target in BINDING.targets if isinstance(target, FunctionTarget))
KERNEL, PACKING = (target for target in BINDING.targets if isinstance(target, OperatorTarget))


class Activation(Enum):
    SILU = "silu"
    RELU2 = "relu2"


def sample(name: str) -> dict[str, Any]:
    found = next(s for s in SPEC.samples(torch.float32, torch.device("cpu")) if s.name == name)
    return dict(zip(SPEC.parameters, found.args, strict=True))


def op(*args: Any) -> torch.Tensor:
    """An implementation that accepts exactly the contract's calls."""
    assert SPEC.check(*args) is None
    return SPEC.oracle(*args).to(args[0].dtype)


def experts(**changed: Any) -> Any:
    """Attributes of vLLM's Triton experts, as far as the target reads them."""
    plain = {"quant_dtype": None, "weight_quant_dtype": None, "gemm1_clamp_limit": None}
    more = {key: changed.pop(key) for key in tuple(changed) if key in plain}
    own = {"quant_config": SimpleNamespace(**plain | more), "w1_bias": None, "w2_bias": None}
    return SimpleNamespace(**own | changed)


def triton_call(call: dict[str, Any], output: torch.Tensor, **changed: Any) -> list[Any]:
    """Arguments of the modular kernel's call of `TritonExperts.apply`."""
    given = {
        "self": experts(),
        "output": output,
        "w1": call["w13"],
        "activation": Activation.SILU,
        "global_num_experts": len(call["w13"]),
        **{name: call[name] for name in ("hidden_states", "w2", "topk_weights", "topk_ids")},
        "expert_map": call["expert_map"],
        "apply_router_weight_on_input": call["apply_router_weight_on_input"],
        **changed,
    }
    return [given.get(name) for name in TRITON.parameters]


@pytest.mark.parametrize("name", ["16 tokens", "experts of other ranks"])
def test_tritons_experts_are_the_op(name: str) -> None:
    call = sample(name)
    output = torch.full_like(call["hidden_states"], torch.nan)
    assert TRITON.route(op)(*triton_call(call, output)) is None
    assert torch.equal(output, op(*call.values()))


def test_weights_that_vllm_has_applied_to_the_input_are_applied_once() -> None:
    call = sample("weights on the input")
    output = torch.empty_like(call["hidden_states"])
    applied = call["hidden_states"] * call["topk_weights"]
    TRITON.route(op)(*triton_call(call, output, hidden_states=applied))
    torch.testing.assert_close(output, op(*call.values()))


@pytest.mark.parametrize(
    "changed",
    [
        {"self": experts(quant_dtype=torch.float8_e4m3fn)},
        {"self": experts(weight_quant_dtype="int4")},
        {"self": experts(quantization_emulation=True)},
        {"self": experts(_lora_context=object())},
        {"self": experts(gemm1_clamp_limit=7.0)},
        {"self": experts(activation_config=SimpleNamespace(clamp_limit=7.0))},
        {"activation": Activation.RELU2},
        {"w1": torch.zeros(8, 64, 64, dtype=torch.int8)},
    ],
    ids=["fp8", "int4", "emulated", "LoRA", "limit", "limit of the model", "relu2", "int8"],
)
def test_experts_that_are_not_the_op_are_left_to_vllm(changed: dict[str, Any]) -> None:
    call = sample("16 tokens")
    output = torch.zeros_like(call["hidden_states"])
    assert TRITON.route(op)(*triton_call(call, output, **changed)) is NotImplemented
    assert not output.any()


def test_tokens_that_pad_a_batch_have_experts_that_count_nothing() -> None:
    call = sample("16 tokens")
    padded = torch.arange(16) >= 12
    ids = call["topk_ids"].masked_fill(padded[:, None], -1)
    output = torch.full_like(call["hidden_states"], torch.nan)
    with override_forward_context(SimpleNamespace(is_padding=padded)):  # type: ignore[arg-type]
        TRITON.route(op)(*triton_call(call, output, topk_ids=ids))
    assert torch.equal(output[:12], op(*call.values())[:12]) and not output[12:].any()


@pytest.mark.parametrize(
    ("device", "backend"), [("a plugin's", "TRITON"), ("tpu", "TPU")], ids=["a plugin's", "TPU"]
)
def test_a_device_that_vllm_has_no_experts_for_gets_those_that_are_the_op(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    platform = SimpleNamespace(
        is_tpu=lambda: device == "tpu", is_out_of_tree=lambda: device == "a plugin's"
    )
    monkeypatch.setattr(unquantized, "current_platform", platform)
    chosen, experts = CHOICE.route(op)(object())
    assert chosen.name == backend
    assert experts is (TritonExperts if backend == "TRITON" else None)
    assert f"{TritonExperts.__module__}.TritonExperts.apply" in TRITON.paths


def test_a_device_of_vllms_own_keeps_its_experts() -> None:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    with pytest.MonkeyPatch.context() as patch:
        own = (unquantized.UnquantizedMoeBackend.CPU, object())
        patch.setattr(unquantized, "select_unquantized_moe_backend", lambda moe_config: own)
        assert CHOICE.route(op)(object()) == own


@pytest.fixture(scope="module")
def kernels() -> Any:
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "prepack_moe_weight"):
        pytest.skip("this vLLM has no such kernel for this processor")
    return torch.ops._C


def cpu_call(call: dict[str, Any], **changed: Any) -> list[Any]:
    given = {
        "output": torch.full_like(call["hidden_states"], torch.nan),
        "input": call["hidden_states"],
        "topk_id": call["topk_ids"],
        "skip_weighted": False,
        "act": call["activation"],
        "isa": "vec",
        **{key: call[key] for key in ("w13", "w2", "w13_bias", "w2_bias", "topk_weights")},
        **changed,
    }
    return [given[name] for name in KERNEL.parameters]


def packing(kernel: Callable[..., Any], *weights: torch.Tensor) -> list[torch.Tensor]:
    packed = [torch.full_like(weight, torch.nan) for weight in weights]
    for weight, target in zip(weights, packed, strict=True):
        assert kernel(weight, target, "vec") is None
    return packed


@pytest.mark.parametrize(
    "name", ["16 tokens", "biases", "gelu, gates near -3", "beyond the limit of swigluoai"]
)
def test_on_the_cpu_the_op_gets_the_weights_as_they_were_loaded(kernels: Any, name: str) -> None:
    call = sample(name)
    with set_current_vllm_config(VllmConfig()):
        w13, w2 = packing(PACKING.route(op), call["w13"], call["w2"])
    arguments = cpu_call(call, w13=w13, w2=w2)
    KERNEL.route(op)(*arguments)
    assert torch.equal(arguments[0], op(*call.values()))
    stock = cpu_call(call)
    stock[2:4] = packing(kernels.prepack_moe_weight, call["w13"], call["w2"])
    assert not torch.equal(stock[2], w13), "the kernel wants another order"
    kernels.cpu_fused_moe(*stock)
    torch.testing.assert_close(stock[0], arguments[0])


def test_what_stock_means_on_the_cpu_packs_first_at_a_size_that_is_left_to_vllm(
    kernels: Any,
) -> None:
    """The kernel must not get the original call: its weights are not packed."""
    call = sample("biases")
    stock = cpu_call(call)
    stock[2:4] = packing(kernels.prepack_moe_weight, call["w13"], call["w2"])
    kernels.cpu_fused_moe(*stock)

    def never(*args: Any) -> torch.Tensor:
        raise AssertionError("the size is vLLM's")

    order = {f"<={len(call['hidden_states'])}": "stock", "rest": "vendor"}
    plan = planning(managing(acme(SPEC.name, never), per_op_order={SPEC.name: order}))
    engine = engine_of(plan)
    operators.Operators().take(engine, Choice({SPEC.name: (KERNEL, PACKING)}, {}))
    try:
        with calling(engine):
            ours = cpu_call(call)
            kernels.cpu_fused_moe(*ours)
    finally:
        engine.unbind()
    assert torch.equal(ours[0], stock[0])


def test_an_implementation_that_packs_for_a_call_gets_vllms_packing() -> None:
    call, target = sample("16 tokens"), torch.zeros(8, 64, 64)
    found: list[Any] = []

    def packs(*args: Any) -> torch.Tensor:
        found.append(PACKING.route(op)(args[1], target, "vec"))
        return args[0]

    KERNEL.route(packs)(*cpu_call(call))
    assert found == [NotImplemented] and not target.any()


def test_weights_that_are_applied_already_are_ones_on_the_cpu_too(kernels: Any) -> None:
    call = sample("weights on the input")
    weights = call["topk_weights"].clone()
    applied = call["hidden_states"] * weights
    arguments = cpu_call(call, input=applied, skip_weighted=True)
    KERNEL.route(op)(*arguments)
    torch.testing.assert_close(arguments[0], op(*call.values()))
    assert torch.equal(call["topk_weights"], weights)


def config(device: str = "cuda", parallel: bool = False, **fields: Any) -> Any:
    inner = SimpleNamespace(**fields)
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(enable_expert_parallel=parallel, tensor_parallel_size=2),
        model_config=SimpleNamespace(
            hf_text_config=inner, hf_config=SimpleNamespace(to_dict=lambda: vars(inner))
        ),
    )


def test_a_model_with_experts_by_any_name_may_have_the_op() -> None:
    assert BINDING.when is not None
    for fields in ({"num_experts": 8}, {"text": {"moe_layers": [1]}}, {"n_routed_experts": 64}):
        assert BINDING.when(config(**fields)), fields
    for fields in ({"hidden_size": 64}, {"n_routed_experts": None}, {"num_local_experts": 0}):
        assert not BINDING.when(config(**fields)), fields

    # vLLM's CPU build cannot run the op under expert parallelism.
    assert BINDING.when(config("cpu", num_experts=8))
    assert BINDING.when(config("cuda", parallel=True, num_experts=8))
    assert not BINDING.when(config("cpu", parallel=True, num_experts=8))


def test_where_the_user_names_it_all_the_same_the_start_ends() -> None:
    parallel = VllmConfig()
    parallel.parallel_config.enable_expert_parallel = True
    with set_current_vllm_config(parallel), pytest.raises(VllmFLError, match="fused_experts=stock"):
        packing(PACKING.route(op), torch.zeros(1, 32, 32))


@pytest.mark.parametrize(
    ("fields", "parallel", "wanted"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}, False, 384),
        ({"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}, True, 768),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}, False, 48),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}, True, 96),
    ],
)
def test_sizes_are_those_of_one_rank(fields: dict[str, int], parallel: bool, wanted: int) -> None:
    sizes = {rule.name: rule.ask for rule in BINDING.sizes}
    asked = config(parallel=parallel, **fields)
    assert sizes["expert_intermediate"](asked) == wanted
    assert sizes["experts"](asked) == next(iter(fields.values()))
    assert sizes["experts_per_token"](asked) == fields["num_experts_per_tok"]
