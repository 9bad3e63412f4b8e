"""Comparison of stock vLLM's layers: planted faults, each above, at twice and at half of its
tolerance. Where a fault is planted is drawn from a seed that a failing test prints."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from quantised_layers import FAULTS, OUT, Fault, draw, made, vllm_process
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_fl.engine.plan import Plan
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_verify.graphs import without_graphs
from vllm_fl_verify.live import Live
from vllm_fl_verify.stock import linear as module
from vllm_fl_verify.stock.experts import Experts
from vllm_fl_verify.stock.linear import Linears
from vllm_fl_verify.stock.ops import _compared, compare_logits
from vllm_fl_verify.stock.rows import StockRows
from vllm_fl_verify.stock.steps import ROUNDINGS, Steps

__all__ = ["draw", "vllm_process"]


def compared(layer: Any, fault: Callable[[], None] | None = None) -> tuple[Linears, StockRows]:
    """Convert the layer's weights as vLLM's loader does; `fault` changes what the kernel got."""
    rows = StockRows()
    linears = Linears(rows)
    kernel = module.kernel_of(layer, layer.quant_method)
    if fault is not None:
        target = layer.quant_method if kernel is None else kernel
        convert = target.process_weights_after_loading

        def process(of: Any) -> None:
            fault()
            convert(of)

        vars(target)["process_weights_after_loading"] = process
    linears.watch({layer: "projection"})
    layer.quant_method.process_weights_after_loading(layer)
    return linears, rows


def problems(rows: StockRows, against: str = module.GIVEN) -> list[str]:
    found = [row for row in rows.to_json() if row["against"] == against]
    assert found and all(row["kind"] == "MergedColumnParallelLinear" for row in found)
    assert all(row["calls"] for row in found)
    return [problem for row in found for problem in row["problems"]]


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4", "int4 with zeros"])
def test_vllms_kernels_are_correct(form: str, draw: random.Random) -> None:
    _, rows = compared(made(form, draw))
    assert not [row for row in rows.to_json() if row["incorrect"]]
    worst = max(row["worst"] for row in rows.to_json())
    assert 0.05 < worst < 0.8


def swapped_rows(layer: Any, draw: random.Random) -> None:
    pair = [draw.randrange(OUT[0]), OUT[0] + draw.randrange(OUT[1])]
    layer.weight.data[pair] = layer.weight.data[pair[::-1]]


@pytest.mark.parametrize(
    ("form", "plant"),
    [
        *((form, each) for form, faults in FAULTS.items() for each in faults),
        ("int8", swapped_rows),
        ("bfloat16", swapped_rows),
    ],
)
def test_a_fault_of_a_kernel_is_found(form: str, plant: Fault, draw: random.Random) -> None:
    layer = made(form, draw)
    _, rows = compared(layer, partial(plant, layer, draw))
    (found,) = problems(rows)
    assert found.startswith("layer projection: ")
    assert "elements exceed the tolerance" in found


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4", "int4 with zeros"])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_an_output_feature_is_off_by_a_share_of_the_tolerance(
    form: str, share: float, draw: random.Random
) -> None:
    """A kernel that is exact except for one feature, and rounds once."""
    layer, feature = made(form, draw), draw.randrange(sum(OUT))
    weight = module._Layer("", layer).weights(module.held_by(layer)).double()
    weight[feature] *= 1 + share * module.PROBE_STEPS[torch.bfloat16]

    def scaled(_: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result = x.double() @ weight.t()
        return (result if bias is None else result + bias).to(torch.bfloat16)

    vars(layer.quant_method)["apply"] = scaled
    _, rows = compared(layer)
    found = problems(rows)
    assert bool(found) == (share > 1)
    assert not found or f", {feature}): got" in found[0]


def test_weights_that_change_after_an_update_are_found(draw: random.Random) -> None:
    layer = made("bfloat16", draw)
    linears, rows = compared(layer)
    linears.compare_again()
    assert not problems(rows, module.RELOADED)
    apply, feature = layer.quant_method.apply, draw.randrange(sum(OUT))

    def freed(*args: Any) -> torch.Tensor:
        result = apply(*args)
        result[:, feature] = draw.choice([float("nan"), float("inf"), 0.0])
        return result

    vars(layer.quant_method)["apply"] = freed
    linears.compare_again()
    (found,) = problems(rows, module.RELOADED)
    assert f", {feature}): got" in found


class Blocks:
    """A quantisation method with a scale for each block of fp8 weights, in plain PyTorch."""

    def __init__(self, transposes: bool) -> None:
        self.transposes = transposes

    def process_weights_after_loading(self, layer: Any) -> None:
        scale = layer.weight_scale_inv.data
        scale = scale.t() if self.transposes else scale
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        self.weight = (layer.weight.data.float() * spread).to(torch.bfloat16)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, bias)


@pytest.mark.parametrize("transposes", [False, True])
def test_a_transposed_block_scale_is_found(transposes: bool, draw: random.Random) -> None:
    layer = ReplicatedLinear(256, 256, bias=False, disable_tp=True)
    weight = torch.randn(256, 256, dtype=torch.float32) * 100
    layer.weight = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
    scale = torch.rand(2, 2, dtype=torch.float32) + 0.5
    scale[0, 1] = scale[1, 0] * (1 + draw.choice([-1, 1]) * 0.1)
    layer.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    layer.weight_block_size = [128, 128]
    layer.quant_method = Blocks(transposes)
    rows = StockRows()
    Linears(rows).watch({layer: "down"})
    layer.quant_method.process_weights_after_loading(layer)
    (row,) = rows.to_json()
    assert (row["kind"], row["class"]) == ("ReplicatedLinear", "Blocks")
    assert bool(row["problems"]) == transposes
    assert not transposes or row["problems"][0].startswith("layer down: ")


class Mixture(nn.Module):
    """The attributes of vLLM's layer with routed experts, whose method is this object."""

    def __init__(self, draw: random.Random, wrong: str = "") -> None:
        super().__init__()
        self.wrong, self.draw = wrong, draw
        experts, self.hidden_size, inner = 12, 64, 32
        pick = torch.Generator().manual_seed(draw.randrange(2**31))
        for name, shape in (("w13", (2 * inner, 64)), ("w2", (64, inner))):
            drawn = torch.randn(experts, *shape, generator=pick, dtype=torch.float32) / 6
            held = nn.Parameter(drawn.to(torch.bfloat16), requires_grad=False)
            self.register_parameter(f"{name}_weight", held)
        self.moe_config = SimpleNamespace(
            num_local_experts=experts, experts_per_token=2, intermediate_size_per_partition=inner
        )
        self.params_dtype, self.expert_map = torch.bfloat16, None
        self.activation = SimpleNamespace(value="silu")
        self.apply_router_weight_on_input = False
        self.quant_method = SimpleNamespace(apply=self.apply, is_monolithic=False)

    def apply(
        self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared: Any
    ) -> torch.Tensor:
        spec = known_contracts().contracts["fused_experts"]
        first, used = self.w13_weight.clone(), topk_ids.unique().tolist()
        if self.wrong == "expert":
            one = self.draw.choice(used)
            first[one] = first[one].roll(32, 0)  # up before gate
        result = spec.oracle(x, first, self.w2_weight, topk_weights, topk_ids)
        if self.wrong == "last token":
            result[-1] *= 1.5
        return result.to(torch.bfloat16)


@pytest.mark.parametrize("wrong", ["", "expert", "last token"])
def test_experts_are_compared(wrong: str, draw: random.Random) -> None:
    layer, rows = Mixture(draw, wrong), StockRows()
    some = Experts(layer, torch.Generator().manual_seed(draw.randrange(2**31)))
    assert len(some.chosen) == 8
    spec = known_contracts().contracts["fused_experts"]
    some.compare(rows, ("Mixture", "Method", "experts"), "mlp.experts", spec)
    (row,) = rows.to_json()
    assert row["calls"] == 3 and bool(row["incorrect"]) == bool(wrong)


@pytest.mark.parametrize("share", [0.0, 0.15, 2.0])
def test_logits_are_compared(share: float, draw: random.Random) -> None:
    head = ParallelLMHead(500, 64)
    head.weight.data = torch.randn(head.weight.shape, dtype=torch.float32).to(torch.bfloat16)
    head.quant_method.process_weights_after_loading(head)
    model = nn.ModuleDict({"logits": LogitsProcessor(500, soft_cap=30.0, scale=0.25)})
    token = draw.randrange(500)

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        return model["logits"](head, hidden)

    model.compute_logits = compute_logits
    forward = model["logits"].forward

    def scaled(*args: Any) -> torch.Tensor:
        got: torch.Tensor = forward(*args).float()
        got[:, token] *= 1 + share * 2 * 2.0**-7 * 3
        return got.to(torch.bfloat16)

    vars(model["logits"])["forward"] = scaled
    config = SimpleNamespace(dtype=torch.bfloat16, get_hidden_size=lambda: 64)
    config = SimpleNamespace(model_config=config)
    rows = StockRows()
    compare_logits(SimpleNamespace(vllm_config=config, device="cpu"), model, rows, 0)
    (row,) = rows.to_json()
    assert bool(row["incorrect"]) == (share > 1)
    assert share <= 1 or f", {token}): got" in row["problems"][0]


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_layers_are_compared_with_their_contracts(share: float, draw: random.Random) -> None:
    layers = nn.ModuleDict({f"norm{n}": RMSNorm(128) for n in range(4)})
    layers.update({f"act{n}": SiluAndMul() for n in range(4)})
    layers["rope"] = get_rope(
        64, max_position=128, is_neox_style=True, rope_parameters={"rope_theta": 10000.0}
    )
    specs = known_contracts().contracts
    faulty = draw.choice([name for name in layers if name != "rope"])
    op = "rms_norm" if faulty.startswith("norm") else "silu_and_mul"
    factor = 1 + share * specs[op].tolerance(torch.bfloat16).rtol
    own = layers[faulty]._forward_method

    @wraps(own)
    def scaled(*args: Any) -> Any:
        result = own(*args)
        first, *rest = result if isinstance(result, tuple) else (result,)
        first = (first.float() * factor).to(first.dtype)
        return (first, *rest) if rest else first

    layers[faulty]._forward_method = scaled
    live = Live(Plan("eager", {}, contracts=specs), {"": layers}, torch.device("cpu"))
    rows, x = StockRows(), torch.randn(40, 128)
    with torch.inference_mode(), live.watching(), _compared(live, rows):
        for name, layer in layers.items():
            if name == "rope":
                q, k = layer(torch.arange(40), x.clone(), x.clone())
                assert q.shape == k.shape == (40, 128)
            elif name.startswith("norm"):
                layer(x.clone(), *([x.clone()] if name == "norm3" else []))
            else:
                layer(torch.cat((x, x), -1))
    found = {row["kind"]: row for row in rows.to_json()}
    assert {kind: row["layers"] for kind, row in found.items()} == {
        "RMSNorm": 4, "SiluAndMul": 4, "RotaryEmbedding": 1,
    }  # fmt: skip
    wrong = [problem for row in found.values() for problem in row["problems"]]
    assert bool(wrong) == (share > 1)
    assert share <= 1 or wrong[0].startswith(f"layer {faulty}: ")


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_steps_are_compared_with_eager_steps(share: float, draw: random.Random) -> None:
    model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    graphs = {"cudagraph_capture_sizes": [4], "cudagraph_mode": SimpleNamespace(name="FULL")}
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_num_layers=lambda _: 4),
        parallel_config=None,
        quant_config=None,
        compilation_config=SimpleNamespace(**graphs),
    )
    runner = SimpleNamespace(get_model=lambda: model)
    rows, states = StockRows(), [torch.randn(n, 64, dtype=torch.float32) for n in (8, 4, 4, 1)]
    worker = SimpleNamespace(model_runner=runner, vllm_config=config, execute_model=print)
    steps = Steps(worker)

    def run(state: torch.Tensor) -> None:
        worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=len(state)))
        model.compute_logits(state)

    limit = ROUNDINGS * 2.0**-7 * 2
    step = draw.randrange(4)
    for number, state in enumerate(states):
        served = state.clone()
        if number == step:
            served[draw.randrange(len(served))] *= 1 + share * limit
        run(served)
    steps.go_eager()
    for state in states:
        run(state)
    steps.compare(rows)
    found = {row["class"]: row for row in rows.to_json()}
    assert {name: row["calls"] for name, row in found.items()} == {
        "captured graph": 3, "compiled": 1,
    }  # fmt: skip
    wrong = [problem for row in found.values() for problem in row["problems"]]
    assert bool(wrong) == (share > 1)
    assert share <= 1 or wrong[0].startswith(f"layer step {step} of ")


def test_a_step_without_its_graph_has_no_requests_of_padding() -> None:
    """vLLM's newer model runner pads the requests of a full graph; attention rejects that."""
    cudagraph_utils = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")
    modes = pytest.importorskip("vllm.config.compilation").CUDAGraphMode
    step = cudagraph_utils.BatchExecutionDescriptor(modes.FULL, num_tokens=4, num_reqs=4)
    manager = type("Manager", (), {"dispatch": lambda self, *batch: step})()
    with without_graphs(SimpleNamespace(cudagraph_manager=manager)):
        eager = manager.dispatch(3, 3, 1, 0)
    assert (eager.cg_mode, eager.num_tokens, eager.num_reqs) == (modes.NONE, 4, 3)
    assert manager.dispatch(3, 3, 1, 0) is step
