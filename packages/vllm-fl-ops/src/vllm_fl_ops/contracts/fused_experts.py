"""The routed experts of a mixture, not quantised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import flag, integer, integers, like, tensor, word
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, Sample, Tolerance

from .common import contract
from .routing import taken_ids

if TYPE_CHECKING:
    import torch

EXPERT_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")

ALPHA, LIMIT = 1.702, 7.0
"""Constants of gpt-oss's activation."""

ALL_EXPERTS, ONE_EXPERT = 1 << 22, 5 << 20
"""Maximum number of weights in a sample: of all experts at the model's size, and of one expert."""

FEW_EXPERTS, NARROW = 4, (128, 64)
"""Sizes of reduced calls: experts (with all features), and features (with all experts)."""


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

    act is a function of a gate and an up projection. For "silu" it is silu(gate) * up. For "gelu"
    (with the error function) and "gelu_tanh" (approximated by tanh) it is gelu(gate) * up. For
    "swigluoai", gpt-oss's activation, it is (up + 1) * gate * sigmoid(1.702 * gate), with gate at
    most 7 and up from -7 to 7.

    Args:
        hidden_states: (tokens, hidden), float32, float16 or bfloat16, of any layout. A row with NaN
            affects no other row; its own result is unspecified if one of its positions has no
            expert.
        w13: (experts, 2 * intermediate, hidden), of hidden_states' dtype and device: the rows of
            the gate, then of up. For "swigluoai" they alternate.
        w2: (experts, hidden, intermediate), of w13's dtype.
        topk_weights: (tokens, k), floating point, without unit, of any layout: the weights of the
            experts.
        topk_ids: (tokens, k), int32 or int64, of any layout: the token's experts, numbered over all
            ranks, below global_num_experts. A negative number (vLLM's -1, for padding) is not an
            expert, and adds nothing even with a weight of NaN.
        activation: "silu", "gelu", "gelu_tanh" or "swigluoai".
        apply_router_weight_on_input: whether the weight multiplies x instead of the result. Only
            with k = 1.
        global_num_experts: the number of the model's experts: the length of expert_map. Without a
            map, the number of experts in w13, or -1, which means the same.
        expert_map: (global_num_experts,), int32: the index of each expert in w13 and w2, or -1 for
            an expert on another rank, which adds nothing. None: all experts are on this rank, in
            order.
        w13_bias: (experts, 2 * intermediate), of hidden_states' dtype.
        w2_bias: (experts, hidden), of hidden_states' dtype.

    Returns:
        (tokens, hidden), contiguous, of hidden_states' dtype and device: the sum over this rank's
        experts. The inputs are not modified.

    Raises:
        CallError: an argument violates this contract. An id beyond the experts is an error on a
            CPU. On an accelerator, it causes a device error or undefined results.

    Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
    Mixture-of-Experts Layer" (arXiv:1701.06538), with the gated experts of Jiang et al., "Mixtral
    of Experts" (arXiv:2401.04088); "swigluoai": OpenAI, gpt-oss (arXiv:2508.10925).
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


def _dense(*call: Any) -> torch.Tensor:
    """Compute every token with every expert of the model; experts on other ranks are zeros."""
    import torch

    hidden_states, w13, w2, topk_weights, topk_ids, *rest = call
    activation, apply_router_weight_on_input, _, expert_map, w13_bias, w2_bias = rest
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


def _routing(
    source: Source, tokens: int, experts: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids) of a router: k distinct experts for each token."""
    import torch

    ids = taken_ids(source, tokens, k, experts)
    weights = source.normal(tokens, k, dtype=torch.float32).sigmoid() * (2 / k)
    return weights, ids.to(torch.int32).contiguous()


def _weights(
    source: Source, experts: int, hidden: int, inner: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13, w2) that keep the magnitude of the inputs."""
    w13 = source.normal(experts * 2 * inner, hidden, scale=hidden**-0.5)
    w2 = source.normal(experts * hidden, inner, scale=inner**-0.5)
    return w13.view(experts, 2 * inner, hidden), w2.view(experts, hidden, inner)


def _samples(source: Source) -> Iterator[Sample]:
    import torch

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

    # The two forms of gelu differ by a tenth for a gate near -3, and hardly elsewhere.
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
        """(x, weights, ids): one position has no expert, and two stale rows have no experts."""
        x, (weights, ids) = source.normal(9, 64), _routing(source, 9, 8, k)
        ids[2, 0], ids[7] = -1, -1
        weights[2, 0], weights[7] = math.nan, math.inf
        x[7], ids[8] = math.nan, -1
        return x, weights, ids

    x, *of_two = padded(2)
    yield Sample("padding", (x, w13, w2, *of_two, *plain), open_rows=(7,))
    x, *of_three = padded(3)
    elsewhere = x, w13[:3], w2[:3], *of_three, "silu", False, 8, here.roll(1), None, None
    yield Sample("padding, experts of other ranks", elsewhere, open_rows=(7,))
    x, *of_one = padded(1)
    on_input = x, w13, w2, *of_one, "silu", True, -1, None, None, None
    yield Sample("padding, weights on the input", on_input, 2.0, open_rows=(7,))
    broken = source.normal(9, 64)
    broken[4, 7] = math.nan
    yield Sample("NaN in a row", (broken, w13, w2, *_routing(source, 9, 8, 2), *plain))


def _served(
    source: Source,
    sizes: ModelSizes,
    hidden: int,
    experts: int,
    experts_per_token: int,
    expert_intermediate: int,
) -> Iterator[Sample]:
    scale = 200.0 if source.large else 1.0  # the ratio of the results' standard deviations
    shapes = tuple(_shapes(experts, experts_per_token, hidden, expert_intermediate))
    all_weights = [_weights(source, *shape[0]) for shape in shapes]
    for tokens in sizes.tokens:
        for (shape, taken, smaller), weights in zip(shapes, all_weights, strict=True):
            count, features, within = shape
            x = source.normal(tokens, features)
            if source.large:
                x = source.spiked(tokens, features, scale=4.0, peak=100.0)
            routed = _routing(source, tokens, count, taken)
            name = f"{tokens} x {features} through {count} of {within}{', large' * source.large}"
            args = (x, *weights, *routed, "silu", False, -1, None, None, None)
            yield Sample(name, args, scale, smaller)


def _shapes(
    experts: int, k: int, hidden: int, inner: int
) -> Iterator[tuple[tuple[int, int, int], int, str]]:
    """Yield ((experts, hidden, intermediate), experts of a token, how the call is reduced).

    For a large model, some calls have all experts with few features, and others have few experts
    with all features. With all experts and all features, the oracle would take seconds. Live
    verification uses the model's weights.
    """
    if 3 * experts * hidden * inner <= ALL_EXPERTS:
        yield (experts, hidden, inner), k, ""
        return
    narrow = min(hidden, NARROW[0]), min(inner, NARROW[1])
    if experts > FEW_EXPERTS:
        smaller = f"{narrow[0]} of {hidden} features through {narrow[1]} of {inner}"
        yield (experts, *narrow), k, f"{smaller}, for all {experts} experts"
    few = min(experts, FEW_EXPERTS)
    remark = f"{few} of {experts} experts" if few < experts else ""
    room = ONE_EXPERT // 3
    if hidden * inner <= room:
        yield (few, hidden, inner), min(k, 2), remark
        return
    within, features = (max(64, room // size // 64 * 64) for size in (hidden, inner))
    for shape, what in (
        ((few, hidden, min(within, inner)), f"{min(within, inner)} of {inner} inside"),
        ((few, min(features, hidden), inner), f"{min(features, hidden)} of {hidden} features"),
    ):
        yield shape, min(k, 2), ", ".join(filter(None, (remark, what)))


def _part(*call: Any) -> tuple[Any, ...]:
    """Return the call with only the experts that its tokens use on this rank."""
    import torch

    x, w13, w2, weights, topk_ids, activation, on_input, _, expert_map, *biases = call
    count, ids = w13.shape[0], topk_ids.long()
    here = torch.arange(count, device=ids.device) if expert_map is None else expert_map.long()
    known = ids[(ids >= 0) & (ids < len(here))]
    taken = here[known].unique()
    taken = taken[taken >= 0]
    if not taken.numel():
        taken = taken.new_zeros(1)  # never read
    places = torch.full((count,), -1, dtype=torch.int32, device=ids.device)
    places[taken] = torch.arange(len(taken), dtype=torch.int32, device=ids.device)
    left = torch.where(here >= 0, places[here.clamp(min=0)], -1).to(torch.int32)
    w13, w2, *biases = (None if of is None else of[taken] for of in (w13, w2, *biases))
    return x, w13, w2, weights, topk_ids, activation, on_input, len(here), left, *biases


def _bad(good: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    import torch

    x, w13, ids = good["hidden_states"], good["w13"], good["topk_ids"]
    count = len(w13)
    yield "routing for fewer tokens", {n: good[n][:3] for n in ("topk_weights", "topk_ids")}
    yield "weights on the input, for two experts", {"apply_router_weight_on_input": True}
    here = torch.arange(count, dtype=torch.int32, device=x.device)
    mapped = {"expert_map": here, "global_num_experts": count}
    if x.device.type == "cpu":  # bad ids make an accelerator unusable
        yield "an id beyond the experts", {"topk_ids": ids + count}
        yield "an id beyond the map", mapped | {"topk_ids": ids + count}
    yield "a list of experts", mapped | {"expert_map": [*range(count)]}
    yield "a map of fewer experts", mapped | {"global_num_experts": 2 * count}
    yield "a bias for every token", {"w13_bias": x.new_zeros(len(x), w13.shape[1])}


SPEC = contract(
    fused_experts,
    {
        "hidden_states": tensor("tokens, hidden"),
        "w13": tensor("experts, 2 * intermediate, hidden", "hidden_states", where="experts >= 1"),
        "w2": tensor("experts, hidden, intermediate", "hidden_states"),
        "topk_weights": tensor("tokens, k", where="k >= 1"),
        "expert_map": tensor("mapped", "int32").optional(),
        "activation": word(*EXPERT_ACTIVATIONS),
        "apply_router_weight_on_input": flag("not value or k == 1"),
        "global_num_experts": integer(
            "value == (experts if expert_map is None else mapped)"
            " or (value == -1 and expert_map is None)",
            kind="int",
        ),
        "w13_bias": tensor("experts, 2 * intermediate", "hidden_states").optional(),
        "w2_bias": tensor("experts, hidden", "hidden_states").optional(),
        "topk_ids": integers("tokens, k", "high < (experts if expert_map is None else mapped)"),
    },
    (like("hidden_states"),),
    bad=_bad,
    group="moe",
    samples=_samples,
    served=_served,
    part=_part,
    second_form=_dense,
    tolerances={
        "float32": Tolerance(
            1e-5,
            4e-5,
            "sums of thousands of products, in any order; atol for fp32's error function, with a "
            "relative error of 1e-5 at a gate of -3",
        ),
        "float16": Tolerance(
            2e-3,
            3.5e-3,
            "4 roundings of 2^-11; atol because products that were rounded before the second "
            "matrix may cancel in it: 7 standard deviations of 3 roundings; with 5, one of some "
            "tens of correct batches of 65536 elements would exceed it",
        ),
        "bfloat16": Tolerance(
            1.6e-2,
            2.8e-2,
            "4 roundings of 2^-8; atol as for float16. vLLM's tests of fused experts use 2e-2, "
            "for fewer elements",
        ),
    },
)
