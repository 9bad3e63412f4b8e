"""The routed experts of a mixture, not quantised: each token through the experts that it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.checks import Problem, floating_tensor, on_device_of, shaped
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import BadInput, ModelSizes, OpSpec, Sample, Tolerance, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["SPEC"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")

ALPHA, LIMIT = 1.702, 7.0
"""The numbers of gpt-oss's activation."""

ALL_EXPERTS, ONE_EXPERT = 1 << 22, 5 << 20
"""Weights of all experts with which a served model's call is tried as it is; and of one."""

FEW_EXPERTS, NARROW = 4, (128, 64)
"""Of a larger model: how many experts have all features, and the features of all experts."""


def fused_experts(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum, over a token's experts, of weight * (act(x @ w13.T + w13_bias) @ w2.T + w2_bias).

    act of a gate and an up projection is silu(gate) * up, gelu(gate) * up with the error function
    ("gelu") or with its tanh form ("gelu_tanh"), or gpt-oss's activation ("swigluoai"):
    (up + 1) * gate * sigmoid(1.702 * gate), the gate at most 7 and up from -7 to 7.

    Args:
        hidden_states: (tokens, hidden), float32, float16 or bfloat16, of any layout. A row with NaN
            spoils no other; its own is open where a place of it has no expert.
        w13: (experts, 2 * intermediate, hidden), of hidden_states' dtype and on its device: the
            rows of the gate, then those of up. For "swigluoai" they take turns.
        w2: (experts, hidden, intermediate), of the same dtype.
        topk_weights: (tokens, k), floating, without unit, of any layout: how much each expert
            counts.
        topk_ids: (tokens, k), int32 or int64, of any layout: the token's experts, numbered over all
            ranks, below global_num_experts. A negative number (vLLM's -1, for padding) stands for
            no expert: the place adds nothing, whatever its weight is.
        activation: "silu", "gelu", "gelu_tanh" or "swigluoai".
        apply_router_weight_on_input: the weight multiplies x in place of the result. Only with
            k = 1.
        global_num_experts: how many experts the model has; -1 stands for as many as w13 has. It is
            another number only beside an expert_map.
        expert_map: (global_num_experts,), int32: an expert's row in w13 and w2, or -1 for one that
            another rank has: it adds nothing here. None: all experts are here, in order.
        w13_bias: (experts, 2 * intermediate), of hidden_states' dtype.
        w2_bias: (experts, hidden), of hidden_states' dtype.

    Returns:
        (tokens, hidden), contiguous, of hidden_states' dtype and on its device: the share of this
        rank's experts. No argument is overwritten.

    Raises:
        CallError: an argument is not as said here. An id beyond the experts is an error on a CPU;
            an accelerator does not look for it, and it is the device's own error, or undefined.

    Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
    Mixture-of-Experts Layer" (arXiv:1701.06538), with the gated experts of Jiang et al., "Mixtral
    of Experts" (arXiv:2401.04088); "swigluoai" as OpenAI, gpt-oss (arXiv:2508.10925).
    """
    import torch

    x, weights = hidden_states.double(), topk_weights.double()
    if apply_router_weight_on_input:
        x, weights = x * weights, torch.ones_like(weights)
    rows = topk_ids.long()
    if expert_map is not None:
        rows = expert_map.long()[rows.clamp(min=0)].where(rows >= 0, rows)
    out = torch.zeros_like(x)
    for expert in range(w13.shape[0]):
        token, slot = (rows == expert).nonzero(as_tuple=True)
        if not token.numel():
            continue
        inner = x[token] @ w13[expert].double().T
        if w13_bias is not None:
            inner = inner + w13_bias[expert].double()
        result = _activated(inner, activation) @ w2[expert].double().T
        if w2_bias is not None:
            result = result + w2_bias[expert].double()
        out.index_add_(0, token, result * weights[token, slot].unsqueeze(1))
    return out


def _activated(inner: torch.Tensor, activation: str) -> torch.Tensor:
    import torch.nn.functional as F

    if activation == "swigluoai":
        gate, up = inner[..., ::2].clamp(max=LIMIT), inner[..., 1::2].clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * (ALPHA * gate).sigmoid()
    gate, up = inner.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation]) * up


def _dense(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every token through every expert of the model; those that are not here are zeros."""
    import torch

    count = w13.shape[0] if expert_map is None else expert_map.numel()
    here = torch.arange(count) if expert_map is None else expert_map.long()

    def of_all(weight: torch.Tensor) -> torch.Tensor:
        spread = weight.new_zeros((count, *weight.shape[1:]), dtype=torch.float64)
        spread[here >= 0] = weight.double()[here[here >= 0]]
        return spread

    absent = topk_ids < 0
    x, weights = hidden_states.double(), topk_weights.double().masked_fill(absent, 0.0)
    share = torch.zeros(x.shape[0], count, dtype=torch.float64)
    share.scatter_add_(1, topk_ids.long().masked_fill(absent, 0), weights)
    if apply_router_weight_on_input:
        x, share = torch.einsum("th,tk->th", x, weights), (share != 0).double()
    inner = torch.einsum("th,eih->tei", x, of_all(w13))
    if w13_bias is not None:
        inner = inner + of_all(w13_bias)
    if activation == "swigluoai":
        gate, up = inner.unflatten(-1, (-1, 2)).unbind(-1)
        most = torch.tensor(LIMIT, dtype=torch.float64)
        gate, up = torch.minimum(gate, most), up.sign() * torch.minimum(up.abs(), most) + 1
        acted = up * gate / (1 + torch.exp(-ALPHA * gate))
    else:
        gate, up = inner.tensor_split(2, dim=-1)
        if activation == "silu":
            turned = gate * (0.5 + 0.5 * torch.tanh(gate / 2))
        elif activation == "gelu":
            turned = gate * torch.special.ndtr(gate)
        else:
            turned = gate * torch.sigmoid((8 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
        acted = turned * up
    result = torch.einsum("tei,ehi->teh", acted, of_all(w2))
    if w2_bias is not None:
        result = result + of_all(w2_bias)
    return torch.einsum("te,teh->th", share, result)


def _fake(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return hidden_states.new_empty(hidden_states.shape)


def _check(
    hidden_states: Any,
    w13: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any = "silu",
    apply_router_weight_on_input: Any = False,
    global_num_experts: Any = -1,
    expert_map: Any = None,
    w13_bias: Any = None,
    w2_bias: Any = None,
) -> Problem:
    x = hidden_states
    problem = floating_tensor("hidden_states", x)
    if problem:
        return problem
    if x.ndim != 2:
        return "hidden_states", f"must be (tokens, hidden), got {tuple(x.shape)}"
    problem = _weight("w13", w13, x, "(experts, 2 * intermediate, hidden)")
    if problem:
        return problem
    experts, inner, hidden = w13.shape
    if hidden != x.shape[1] or inner % 2 or not experts:
        return "w13", f"must be (1 or more, even, {x.shape[1]}), got {tuple(w13.shape)}"
    return (
        _weight("w2", w2, x, "(experts, hidden, intermediate)")
        or shaped(
            "w2", w2, (experts, hidden, inner // 2), "w13's (experts, hidden, intermediate) ="
        )
        or _check_routing(x, topk_weights, topk_ids)
        or _check_flags(activation, apply_router_weight_on_input, topk_ids.shape[1])
        or _check_map(x, experts, global_num_experts, expert_map)
        or _check_ids(topk_ids, experts if expert_map is None else expert_map.numel())
        or _bias("w13_bias", w13_bias, x, (experts, inner))
        or _bias("w2_bias", w2_bias, x, (experts, hidden))
    )


def _weight(name: str, value: Any, x: torch.Tensor, meaning: str) -> Problem:
    problem = floating_tensor(name, value)
    if problem:
        return problem
    if value.dtype != x.dtype:
        return name, f"must be of hidden_states' dtype {x.dtype}, got {value.dtype}"
    if value.ndim != 3:
        return name, f"must be {meaning}, got {tuple(value.shape)}"
    return on_device_of(name, value, "hidden_states", x)


def _bias(name: str, value: Any, x: torch.Tensor, shape: tuple[int, int]) -> Problem:
    if value is None:
        return None
    problem = floating_tensor(name, value)
    if problem:
        return problem
    if value.dtype != x.dtype:
        return name, f"must be of hidden_states' dtype {x.dtype}, got {value.dtype}"
    return shaped(name, value, shape, "w13's and w2's sizes") or on_device_of(
        name, value, "hidden_states", x
    )


def _check_routing(x: torch.Tensor, topk_weights: Any, topk_ids: Any) -> Problem:
    import torch

    problem = floating_tensor("topk_weights", topk_weights)
    if problem:
        return problem
    if topk_weights.ndim != 2 or topk_weights.shape[0] != x.shape[0] or not topk_weights.shape[1]:
        wanted = f"({x.shape[0]}, 1 or more)"
        return "topk_weights", f"must be (tokens, k) = {wanted}, got {tuple(topk_weights.shape)}"
    if not isinstance(topk_ids, torch.Tensor):
        return "topk_ids", f"must be a torch.Tensor, got {type(topk_ids).__name__}"
    if topk_ids.dtype not in (torch.int32, torch.int64):
        return "topk_ids", f"must be int32 or int64, got {topk_ids.dtype}"
    return (
        shaped("topk_ids", topk_ids, topk_weights.shape, "the shape of topk_weights")
        or on_device_of("topk_weights", topk_weights, "hidden_states", x)
        or on_device_of("topk_ids", topk_ids, "hidden_states", x)
    )


def _check_flags(activation: Any, on_input: Any, k: int) -> Problem:
    if activation not in ACTIVATIONS:
        return "activation", f"must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
    if on_input and k != 1:
        return "apply_router_weight_on_input", f"must be False for more than one expert, k is {k}"
    return None


def _check_map(x: torch.Tensor, experts: int, count: Any, expert_map: Any) -> Problem:
    import torch

    if isinstance(count, bool) or not isinstance(count, int):
        return "global_num_experts", f"must be a whole number, got {type(count).__name__}"
    if expert_map is None:
        if count in (-1, experts):
            return None
        return "global_num_experts", f"must be -1 or w13's {experts} experts, got {count}"
    if not isinstance(expert_map, torch.Tensor):
        return "expert_map", f"must be a torch.Tensor, got {type(expert_map).__name__}"
    if expert_map.dtype != torch.int32 or expert_map.ndim != 1:
        got = f"{expert_map.dtype} of {expert_map.ndim} dimensions"
        return "expert_map", f"must be int32 of one dimension, got {got}"
    if count != expert_map.numel():
        wanted = f"as many as expert_map has entries, {expert_map.numel()}"
        return "global_num_experts", f"must be {wanted}, got {count}"
    return on_device_of("expert_map", expert_map, "hidden_states", x)


def _check_ids(topk_ids: torch.Tensor, count: int) -> Problem:
    if topk_ids.device.type == "meta" or not topk_ids.numel():
        return None
    highest = int(topk_ids.max())
    if highest >= count:
        return "topk_ids", f"must be below the number of experts, {count}, got {highest}"
    return None


def _routing(
    source: Source, tokens: int, experts: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids) of a router: k experts of each token, no two the same."""
    import torch

    scores = source.normal(tokens, experts, dtype=torch.float32)
    weights = source.normal(tokens, k, dtype=torch.float32).sigmoid() * (2 / k)
    return weights, scores.argsort(dim=-1)[:, :k].to(torch.int32).contiguous()


def _weights(
    source: Source, experts: int, hidden: int, inner: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13, w2) with which results are of the magnitude of the inputs."""
    w13 = source.normal(experts * 2 * inner, hidden, scale=hidden**-0.5)
    w2 = source.normal(experts * hidden, inner, scale=inner**-0.5)
    return w13.view(experts, 2 * inner, hidden), w2.view(experts, hidden, inner)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    import torch

    source = Source(dtype, device)
    plain = "silu", False, -1, None, None, None
    w13, w2 = _weights(source, 8, 64, 32)
    for tokens in (16, 1, 0):
        name = f"{tokens} token{'s' * (tokens != 1)}"
        x = source.normal(tokens, 64)
        yield Sample(name, (x, w13, w2, *_routing(source, tokens, 8, 2), *plain))

    odd = _weights(source, 3, 37, 37)
    yield Sample(
        "odd sizes, as wide inside",
        (source.normal(7, 37), *odd, *_routing(source, 7, 3, 2), *plain),
    )

    wide = source.normal(20, 64 + 32)
    weights, ids = _routing(source, 10, 8, 6)
    strided = wide[::2, 16:80], w13, w2, weights[:, :3], ids.long()[:, ::2]
    yield Sample("strided views, int64 ids", (*strided, *plain))

    weights, ids = _routing(source, 40, 8, 1)
    crowded = source.normal(40, 64), w13, w2, weights, ids.clamp(min=6)
    yield Sample("most tokens to one expert", (*crowded, *plain))

    here = torch.tensor([-1, 2, -1, 0, -1, -1, 1, -1], dtype=torch.int32, device=source.device)
    parted = source.normal(24, 64), w13[:3], w2[:3], *_routing(source, 24, 8, 2)
    yield Sample("experts of other ranks", (*parted, "silu", False, 8, here, None, None))

    alone = source.normal(9, 64), w13, w2, *_routing(source, 9, 8, 1)
    yield Sample("weights on the input", (*alone, "silu", True, -1, None, None, None))

    biases = source.normal(8, 64), source.normal(8, 64)
    yield Sample("weights on the input, biases", (*alone, "silu", True, -1, None, *biases), 2.0)
    both = source.normal(12, 64), w13, w2, *_routing(source, 12, 8, 3)
    yield Sample("biases", (*both, "silu", False, -1, None, *biases), 2.0)

    # The two forms of gelu differ by a tenth where the gate is near -3, and hardly elsewhere.
    low = source.normal(8, 64, scale=0.1)
    low[:, :32] -= 3.0
    near = source.normal(80, 64, scale=0.5), w13 * 0.2, w2
    near[1][:, 32:] *= 10.0
    for form in ("gelu", "gelu_tanh"):
        routed = _routing(source, 80, 8, 2)
        args = (*near, *routed, form, False, -1, None, low, None)
        yield Sample(f"{form}, gates near -3", args, 4e-2)

    far = source.normal(12, 64, scale=4.0), w13, w2, *_routing(source, 12, 8, 2)
    yield Sample("beyond the limit of swigluoai", (*far, "swigluoai", *plain[1:]), 10.0)

    def padded(k: int) -> tuple[torch.Tensor, ...]:
        """(x, weights, ids): places without an expert, and two stale rows that have none at all."""
        x, (weights, ids) = source.normal(9, 64), _routing(source, 9, 8, k)
        ids[2, 0], ids[7] = -1, -1
        weights[2, 0], weights[7] = math.nan, math.inf
        x[7], ids[8] = math.nan, -1
        return x, weights, ids

    x, *of_two = padded(2)
    yield Sample("padding", (x, w13, w2, *of_two, *plain), open_rows=(7,))
    x, *of_three = padded(3)
    elsewhere = x, w13[:3], w2[:3], *of_three, "silu", False, 8, here.flip(0), None, None
    yield Sample("padding, experts of other ranks", elsewhere, open_rows=(7,))
    x, *of_one = padded(1)
    on_input = x, w13, w2, *of_one, "silu", True, -1, None, None, None
    yield Sample("padding, weights on the input", on_input, 2.0, open_rows=(7,))
    broken = source.normal(9, 64)
    broken[4, 7] = math.nan
    yield Sample("NaN in a row", (broken, w13, w2, *_routing(source, 9, 8, 2), *plain))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    told = [sizes.more.get(n) for n in ("experts", "experts_per_token", "expert_intermediate")]
    if sizes.hidden is None or None in told:
        return
    experts, k, inner = (int(number or 0) for number in told)
    source, scale = Source(dtype, device, large), 80.0 if large else 1.0
    shapes = tuple(_shapes(experts, k, sizes.hidden, inner))
    all_weights = [_weights(source, *shape[0]) for shape in shapes]
    for tokens in sizes.tokens:
        for (shape, taken, smaller), weights in zip(shapes, all_weights, strict=True):
            count, hidden, within = shape
            x = source.normal(tokens, hidden)
            if large:
                x = source.spiked(tokens, hidden, scale=4.0, peak=100.0)
            routed = _routing(source, tokens, count, taken)
            name = f"{tokens} x {hidden} through {count} of {within}{', large' * large}"
            args = (x, *weights, *routed, "silu", False, -1, None, None, None)
            yield Sample(name, args, scale, smaller)


def _shapes(
    experts: int, k: int, hidden: int, inner: int
) -> Iterator[tuple[tuple[int, int, int], int, str]]:
    """((experts, hidden, intermediate), experts of a token, in what it is smaller) of the calls.

    All experts with few features, and all features with few experts: of both at once the oracle
    would take seconds. Live verification has the model's own weights.
    """
    if 3 * experts * hidden * inner <= ALL_EXPERTS:
        yield (experts, hidden, inner), k, ""
        return
    narrow = min(hidden, NARROW[0]), min(inner, NARROW[1])
    if experts > FEW_EXPERTS:
        smaller = f"{narrow[0]} of {hidden} features through {narrow[1]} of {inner}"
        yield (experts, *narrow), k, f"{smaller}, for all {experts} experts"
    few = min(experts, FEW_EXPERTS)
    told = f"{few} of {experts} experts" if few < experts else ""
    room = ONE_EXPERT // 3
    if hidden * inner <= room:
        yield (few, hidden, inner), min(k, 2), told
        return
    within, features = (max(64, room // size // 64 * 64) for size in (hidden, inner))
    for shape, what in (
        ((few, hidden, min(within, inner)), f"{min(within, inner)} of {inner} inside"),
        ((few, min(features, hidden), inner), f"{min(features, hidden)} of {hidden} features"),
    ):
        yield shape, min(k, 2), ", ".join(filter(None, (told, what)))


def _part(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """The same call with the experts alone that its tokens take on this rank."""
    import torch

    count, ids = w13.shape[0], topk_ids.long()
    here = torch.arange(count, device=ids.device) if expert_map is None else expert_map.long()
    known = ids[(ids >= 0) & (ids < len(here))]
    taken = here[known].unique()
    taken = taken[taken >= 0]
    if not taken.numel():
        taken = taken.new_zeros(1)  # of which nothing is read
    places = torch.full((count,), -1, dtype=torch.int32, device=ids.device)
    places[taken] = torch.arange(len(taken), dtype=torch.int32, device=ids.device)
    left = torch.where(here >= 0, places[here.clamp(min=0)], -1).to(torch.int32)
    return (
        hidden_states,
        w13[taken],
        w2[taken],
        topk_weights,
        topk_ids,
        activation,
        apply_router_weight_on_input,
        len(here),
        left,
        None if w13_bias is None else w13_bias[taken],
        None if w2_bias is None else w2_bias[taken],
    )


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    import torch

    source = Source(dtype, device)
    w13, w2 = _weights(source, 4, 32, 32)
    weights, ids = _routing(source, 4, 4, 2)
    good = {
        "hidden_states": source.normal(4, 32),
        "w13": w13,
        "w2": w2,
        "topk_weights": weights,
        "topk_ids": ids,
        "activation": "silu",
        "apply_router_weight_on_input": False,
        "global_num_experts": -1,
        "expert_map": None,
        "w13_bias": None,
        "w2_bias": None,
    }

    def bad(name: str, argument: str, **wrong: Any) -> BadInput:
        return BadInput(name, tuple({**good, **wrong}.values()), argument)

    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    yield bad("not a tensor", "hidden_states", hidden_states=[1.0])
    yield bad("3-D", "hidden_states", hidden_states=source.normal(2, 2, 32))
    yield bad("weights of another dtype", "w13", w13=w13.to(other))
    yield bad("w2 of another dtype", "w2", w2=w2.to(other))
    yield bad("w13 of another width", "w13", w13=source.normal(4, 64, 31))
    yield bad("w2 transposed", "w2", w2=source.normal(4, 32, 64))
    yield bad(
        "routing for fewer tokens", "topk_weights", topk_weights=weights[:3], topk_ids=ids[:3]
    )
    yield bad("fewer ids than weights", "topk_ids", topk_ids=ids[:, :1])
    yield bad("ids of floats", "topk_ids", topk_ids=ids.to(torch.float32))
    yield bad("an activation that nobody has", "activation", activation="tanh")
    yield bad(
        "weights on the input, for two experts",
        "apply_router_weight_on_input",
        apply_router_weight_on_input=True,
    )
    if source.device.type == "cpu":  # an accelerator would be unusable after it
        here = torch.arange(4, dtype=torch.int32, device=source.device)
        yield bad("an id beyond the experts", "topk_ids", topk_ids=ids + 1)
        mapped = {"expert_map": here, "global_num_experts": 4}
        yield bad("an id beyond the map", "topk_ids", topk_ids=ids + 1, **mapped)
    yield bad("more experts than there are", "global_num_experts", global_num_experts=8)
    yield bad("a list of experts", "expert_map", expert_map=[0, 1, 2, 3], global_num_experts=4)
    here = torch.arange(4, dtype=torch.int32, device=source.device)
    yield bad("a map of fewer experts", "global_num_experts", expert_map=here, global_num_experts=8)
    yield bad("a bias for every token", "w13_bias", w13_bias=source.normal(3, 64))
    yield bad("a bias of another width", "w2_bias", w2_bias=source.normal(4, 31))


SPEC = OpSpec(
    oracle=fused_experts,
    variants=(
        Variant(
            "",
            "(Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
            'str activation="silu", bool apply_router_weight_on_input=False, '
            "int global_num_experts=-1, Tensor? expert_map=None, Tensor? w13_bias=None, "
            "Tensor? w2_bias=None) -> Tensor",
        ),
    ),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"hidden_states", "topk_weights", "topk_ids"}),
    bad_inputs=_bad_inputs,
    part=_part,
    second_form=_dense,
    tolerances=MappingProxyType(
        {
            "float32": Tolerance(
                1e-5,
                4e-5,
                "sums of thousands of products, in any order; atol for fp32's error function, "
                "which is 1e-5 of the result off at a gate of -3",
            ),
            "float16": Tolerance(
                2e-3,
                3.5e-3,
                "4 roundings of 2^-11; atol because products that were rounded before the second "
                "matrix may cancel in it: 7 standard deviations of 3 roundings, since at 5 one "
                "batch of 65536 elements in some tens of right ones has one beyond",
            ),
            "bfloat16": Tolerance(
                1.6e-2,
                2.8e-2,
                "4 roundings of 2^-8; atol as for float16. vLLM's own tests of its fused experts "
                "have 2e-2, for fewer elements",
            ),
        }
    ),
)
