"""Calls of vLLM's kernels around experts, by the schemas of the oldest and a later release. PyTorch
code with the kernels' requirements replaces them; tests/gpu compares their numbers on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from anywhere import on_cpu

import vllm_fl
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_cuda.impl import routing
from vllm_fl_verify.verification import compare

CPU = torch.device("cpu")
IMPLS = on_cpu(routing.OPS)
TABLE = Path(vllm_fl.__file__).parent / "integration" / "schemas.json"
GROUPED = (
    "_moe_C::grouped_topk(Tensor scores, int n_group, int topk_group, int topk, bool renormalize, "
    "float routed_scaling_factor, Tensor bias, int scoring_func) -> (Tensor, Tensor)"
)
"""Equal in all releases; missing in the table because we do not replace it."""

ALIGN = (
    "_moe_C::moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, "
    "Tensor! sorted_token_ids, Tensor! experts_ids, Tensor! num_tokens_post_pad, "
    "Tensor? maybe_expert_map"
)
"""The part common to all releases; we do not replace it either."""

SCATTER = ", Tensor(d!)? scatter_idx"


def schemas(release: str) -> dict[str, str]:
    """Operator -> its schema in one release of vLLM."""
    number = int(release.partition(".")[2])
    align = f"{ALIGN}{SCATTER if number >= 32 else ''}) -> ()"
    return {schema.partition("(")[0]: schema for schema in (GROUPED, align)} | {
        entry["schema"].partition("(")[0]: entry["schema"]
        for entry in json.loads(TABLE.read_text())["operators"]
        if int(entry["first"].partition(".")[2]) <= number <= int(entry["last"].partition(".")[2])
    }


KINDS = {"int": int, "bool": bool, "float": float}
KINDS |= dict.fromkeys(("Tensor", "Optional[Tensor]"), torch.Tensor)


class Kernel:
    """Called by a schema's positions: `compute` gets the arguments by name."""

    def __init__(self, schema: str, compute: Callable[[Mapping[str, Any]], Any]) -> None:
        self._schema, self.compute = torch._C.parse_schema(schema), compute

    def __call__(self, *args: Any) -> Any:
        arguments = self._schema.arguments
        assert all(a.has_default_value() for a in arguments[len(args) :])
        given = {a.name: a.default_value for a in arguments[len(args) :]}
        for argument, value in zip(arguments, args, strict=False):
            if value is not None or not isinstance(argument.type, torch.OptionalType):
                assert isinstance(value, KINDS[str(argument.type)]), argument.name
            given[argument.name] = value
        return self.compute(given)


def _scores(logits: torch.Tensor, name: str) -> torch.Tensor:
    assert logits.is_contiguous() and logits.data_ptr() % 16 == 0
    return logits.float().softmax(-1) if name == "softmax" else logits.float().sigmoid()


def _scaled(scores: torch.Tensor, ids: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    weights = scores.gather(-1, ids)
    if given["renormalize"]:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * given.get("routed_scaling_factor", 1.0)


def _topk(name: str) -> Callable[[Mapping[str, Any]], None]:
    def compute(given: Mapping[str, Any]) -> None:
        logits, bias = given["gating_output"], given["bias"]
        scores = _scores(logits, name)
        if bias is not None:
            assert bias.dtype == torch.float32 and bias.is_contiguous()
            assert bias.shape == logits.shape[1:]
        assert given.get("is_padding") is None
        outs = [given[n] for n in ("topk_weights", "topk_indices", "token_expert_indices")]
        assert [out.dtype for out in outs] == [torch.float32, torch.int32, torch.int32]
        assert len({out.data_ptr() for out in outs}) == 3
        assert all(out.is_contiguous() and out.shape == outs[0].shape for out in outs)
        ids = (scores if bias is None else scores + bias).topk(outs[0].shape[1], -1).indices
        outs[0].copy_(_scaled(scores, ids, given))
        outs[1].copy_(ids)

    return compute


def _grouped(given: Mapping[str, Any]) -> Any:
    logits, bias, groups = given["scores"], given["bias"], given["n_group"]
    assert logits.is_contiguous() and logits.dtype == torch.float32, "else scores are rounded"
    assert bias.is_contiguous() and groups <= 32 and given["topk"] <= 32
    scores = logits.sigmoid() if given["scoring_func"] == 1 else logits
    choice = (scores + bias).unflatten(-1, (groups, -1))
    worth = choice.topk(2, -1).values.sum(-1)
    best = worth.topk(given["topk_group"], -1).indices
    taken = torch.zeros_like(worth).scatter(-1, best, 1.0).bool()
    allowed = choice.masked_fill(~taken.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = allowed.topk(given["topk"], -1).indices
    return _scaled(scores, ids, given), ids.int()


def _sum(given: Mapping[str, Any]) -> None:
    input, output = given["input"], given["output"]
    ids, where = given["topk_ids"], given["expert_map"]
    assert output.is_contiguous() and output.shape == (input.shape[0], input.shape[2])
    here = torch.ones(input.shape[:2], dtype=torch.bool) if ids is None else ids >= 0
    if ids is not None and where is not None:
        assert where.dtype == torch.int32 and where.is_contiguous()
        here &= where[ids.clamp(min=0).long()] >= 0
    output.copy_(torch.where(here.unsqueeze(-1), input.float(), 0.0).sum(1))


def _align(given: Mapping[str, Any]) -> None:
    """As 0.32's kernel: ids in the order of places, -1 after the blocks in use."""
    ids, count, size = given["topk_ids"], given["num_experts"], given["block_size"]
    outs = [given[n] for n in ("sorted_token_ids", "experts_ids", "num_tokens_post_pad")]
    where = given["maybe_expert_map"]
    assert ids.is_contiguous() and ids.ndim == 2 and ids.numel(), "an empty grid is a launch error"
    assert ids.dtype in (torch.int32, torch.int64) and -(-count // 32) * 32 < 1024
    assert all(out.is_contiguous() and out.dtype == torch.int32 for out in outs)
    assert outs[1].numel() == -(-outs[0].numel() // size) and outs[2].numel() == 1
    assert given.get("scatter_idx") is None
    if where is not None:
        assert where.dtype == torch.int32 and where.is_contiguous()
    spec = known_contracts().contracts["moe_align_block_size"]
    want = spec.oracle(ids, size, count, where, True, True)
    for out, result in zip(outs, want, strict=True):
        out.copy_(result[: out.numel()])


COMPUTE = {
    "_moe_C::moe_align_block_size": _align,
    "_moe_C::topk_softmax": _topk("softmax"),
    "_moe_C::topk_sigmoid": _topk("sigmoid"),
    "_moe_C::grouped_topk": _grouped,
    "_moe_C::moe_sum": _sum,
}


@pytest.fixture(params=["0.26", "0.32"])
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels of one release, on the CPU."""
    known = schemas(request.param)
    monkeypatch.setattr(routing, "kernel", lambda name: Kernel(known[name], COMPUTE[name]))
    return str(request.param)


@pytest.mark.parametrize("op", IMPLS)
def test_the_calls_give_what_the_contract_says(op: str, release: str) -> None:
    spec = known_contracts().contracts[op]
    for dtype in (getattr(torch, name) for name in spec.dtypes):
        taken = 0
        for sample in spec.samples(dtype, CPU):
            result = compare(IMPLS[op], spec, sample, dtype)
            assert result.status in ("ok", "refused"), f"{sample.name}: {result.reason}"
            taken += result.status == "ok"
        assert taken >= 5, f"{release}: the kernels were hardly asked"


X, BIAS = torch.randn(4, 64), torch.randn(64)
IDS = torch.zeros(4, 2, dtype=torch.int32)
UNSUITABLE = [
    ("moe_topk", (X[:, :60], 2, True, "sigmoid", 1.0, BIAS[:60]), "60 experts"),
    ("grouped_topk", (X, 2, True, 8, 4), "e_score_correction_bias is not None"),
    ("grouped_topk", (X, 40, True, 8, 8, "sigmoid", 1.0, BIAS), "topk=40"),
    ("moe_align_block_size", (IDS, 16, 993), "num_experts=993"),
]
"""Calls that no kernel supports, with a part of the reason."""


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize(("op", "args", "reason"), UNSUITABLE)
def test_what_the_kernels_would_get_wrong_is_refused(
    op: str, args: tuple[Any, ...], reason: str
) -> None:
    assert reason in str(IMPLS[op].supports(*args))
