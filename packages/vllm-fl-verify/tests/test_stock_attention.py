"""Attention on a KV cache: vLLM's backend passes, and each planted fault is found and named."""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_model
import torch
from builders import engine_of, managing, planning

pytest.importorskip("vllm", reason="vLLM is not installed")

sys.path.append(str(Path(tiny_model.__file__).parents[1] / "tests/plugins/fl-bare-cpu/src"))

from fl_bare_cpu.attention import BareCpuAttentionBackend, BareCpuAttentionImpl
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.utils import AttentionGroup

from vllm_fl.errors import StartError
from vllm_fl.integration import engines
from vllm_fl.plugins.inspection import Moment
from vllm_fl.plugins.types import AttentionImpl, BackendImplKind
from vllm_fl_verify.loaded import compare_attention
from vllm_fl_verify.stock.attention import AttentionRow, compared_attention, recording

BLOCKS, BLOCK, HEADS = 64, 32, 8

Runner = Callable[..., Any]


class FaultyImpl(BareCpuAttentionImpl):
    """Attention that adds a share of a fault to its result."""

    fault, share = "", 1.0

    def forward(self, layer: Any, query: Any, *args: Any, **named: Any) -> Any:
        metadata, output = args[3], named["output"]
        right = super().forward(layer, query, *args, **named)
        if not self.fault or metadata is None:
            return right
        kept, wrong, given = right.clone(), copy.copy(self), args[:3]
        wrong.fault, faulty, late = "", metadata, []
        match self.fault:
            case "a window of another size":
                wrong.sliding_window = (self.sliding_window or 1 << 20) + random.choice((-1, 1))
            case "another scale":
                wrong.scale *= 1.05
            case "a dropped block":
                wrong._mask = self._without_block
            case "a stale block":
                table = metadata.block_table.clone()
                table[:, 0] = table[:, 0].roll(1) if len(table) > 1 else table[:, 1]
                faulty = dataclasses.replace(metadata, block_table=table)
            case "a later token":
                wrong._mask = self._with_next
            case "a block that another sequence completes":
                late = metadata.slot_mapping % BLOCK == BLOCK - 1
                if len(late) == len(metadata.seq_lens):
                    given = (args[0], args[1].masked_fill(late[:, None, None], 0), args[2].clone())
        BareCpuAttentionImpl.forward(wrong, layer, query, *given, faulty, output)
        output[late] = kept[late]
        if self.fault == "an exception":
            raise RuntimeError("no shared memory")
        if self.fault == "swapped heads":
            output.copy_(kept.roll(1, 1))
        output.copy_(kept + self.share * (output - kept))
        return output

    def _without_block(self, queries: int, length: int) -> Any:
        mask = self._mask(queries, length)
        first = (length - 1) // BLOCK // 2 * BLOCK
        if first:
            mask[:, first : first + BLOCK] = False
        return mask

    def _with_next(self, queries: int, length: int) -> Any:
        mask = self._mask(queries, length)
        return mask | mask.roll(1, 0) if queries < 2 else mask | mask.roll(-1, 0)


class FaultyBackend(BareCpuAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[FaultyImpl]:
        return FaultyImpl


FAULTS = (
    "a window of another size",
    "another scale",
    "a dropped block",
    "a stale block",
    "a later token",
    "swapped heads",
    "a block that another sequence completes",
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """`runner(options, …, dtype, kv_dtype, backend)`: a runner with a layer for each options."""
    model = tiny_model.make(tmp_path_factory.mktemp("model"))

    @cache
    def config_of(dtype: str, kv_dtype: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_FL_PREFER_ENABLED", "false")
            return EngineArgs(
                str(model),
                skip_tokenizer_init=True,
                dtype=dtype,
                kv_cache_dtype=kv_dtype,
                block_size=BLOCK,
                enforce_eager=True,
            ).create_engine_config()

    def make(
        *layers: dict[str, Any],
        dtype: str = "bfloat16",
        kv_dtype: str = "auto",
        backend: Any = None,
    ) -> Any:
        config = config_of(dtype, kv_dtype)
        table, groups = config.compilation_config.static_forward_context, []
        table.clear()
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        with set_current_vllm_config(config):
            for number, own in enumerate(layers):
                name = f"model.layers.{number}.attn"
                options = {"head_size": 64, "num_kv_heads": 4, "scale": 0.125, **own}
                options |= {"cache_config": config.cache_config, "prefix": name}
                layer = Attention(HEADS, attn_backend=backend, **options)
                spec = layer.get_kv_cache_spec(config)
                group = AttentionGroup(layer.attn_backend, [name], spec, 0)
                group.create_metadata_builders(config, torch.device("cpu"), spec.block_size)
                groups.append(group)
                shape = BLOCKS, layer.num_kv_heads, BLOCK, 2 * layer.head_size
                layer.kv_cache = torch.randn(shape).to(spec.dtype)
        torch.set_default_dtype(before)
        sizes = SimpleNamespace(num_blocks=BLOCKS)
        return SimpleNamespace(vllm_config=config, attn_groups=[groups], kv_cache_config=sizes)

    return make


class Worker:
    def __init__(self, runner: Any) -> None:
        self.model_runner, self.vllm_config = runner, runner.vllm_config


def layers_of(runner: Any) -> list[Any]:
    return [*runner.vllm_config.compilation_config.static_forward_context.values()]


def new_seed() -> int:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    random.seed(seed)
    return seed


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vllms_backend_passes_and_its_cache_is_restored(runner: Runner, dtype: str) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"per_layer_sliding_window": 50},
        {"logits_soft_cap": 30.0, "head_size": 128},
        {"sinks": torch.randn(HEADS), "per_layer_sliding_window": 96},
    ]
    made = runner(*options, dtype=dtype)
    before = [layer.kv_cache.clone() for layer in layers_of(made)]
    rows = compared_attention(made, new_seed())
    assert [row.layers for row in rows] == [(f"model.layers.{n}.attn",) for n in range(4)]
    for row in rows:
        assert row.cases >= 20 and 0 < row.worst < 0.8 and not row.reason, row
        assert row.backend == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    for layer, cached in zip(layers_of(made), before, strict=True):
        assert torch.equal(layer.kv_cache, cached)


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2"])
def test_a_cache_that_truncates_is_found(runner: Runner, kv_dtype: str) -> None:
    """vLLM's CPU backend does not round to nearest."""
    (row,) = compared_attention(runner({}, kv_dtype=kv_dtype), new_seed())
    assert row.is_incorrect and "elements exceed the tolerance" in row.reason


def test_a_layer_without_a_reference_result_is_reported(runner: Runner) -> None:
    made = runner({"alibi_slopes": [0.1] * HEADS}, {})
    layers_of(made)[1].kv_cache = torch.zeros(7, 7)
    alibi, shape = compared_attention(made, 0)
    assert alibi.reason.startswith("no reference result for ALiBi")
    assert "raised NotImplementedError: 64 blocks in a cache of (7, 7)" in shape.reason
    assert not alibi.cases + shape.cases and not alibi.is_incorrect and not shape.is_incorrect


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_from_its_tolerance_on(runner: Runner, fault: str) -> None:
    seed = new_seed()
    window: list[dict[str, Any]] = [{"per_layer_sliding_window": 50}, {"num_kv_heads": 8}]
    made = runner(*window, dtype="float32", backend=FaultyBackend)
    number = 0 if "window" in fault else random.randrange(2)
    layer = layers_of(made)[number]
    layer.impl.fault = fault

    def found(share: float) -> AttentionRow:
        layer.impl.share = share
        random.seed(seed)
        rows = compared_attention(made, seed)
        assert not rows[1 - number].is_incorrect
        return rows[number]

    whole = found(1.0)
    assert whole.is_incorrect and whole.layers == (layer.layer_name,)
    assert whole.reason.startswith(f"{layer.layer_name}, ")
    assert whole.backend.endswith(".FaultyBackend")
    assert found(2 / whole.worst).is_incorrect
    assert not found(0.5 / whole.worst).is_incorrect


def test_layers_are_compared_by_arguments(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording():
        made = runner({"logits_soft_cap": 20.0})
    impl = layers_of(made)[0].impl
    impl.logits_soft_cap = 0
    assert compared_attention(made, 0)[0].is_incorrect
    impl.logits_soft_cap, impl.scale = 20.0, 0.125 * 1.05
    assert compared_attention(made, 0, few=True)[0].is_incorrect
    impl.scale = 0.125
    of_all, of_few = (compared_attention(made, 0, few=few)[0] for few in (False, True))
    assert not (of_all.is_incorrect or of_few.is_incorrect) and of_few.cases < of_all.cases
    monkeypatch.setattr(made.vllm_config.scheduler_config, "max_num_seqs", 1)
    assert compared_attention(made, 0)[0].cases == of_all.cases - 3  # no step of two sequences


PATH = f"{__name__}.FaultyBackend"


def planned(patch: pytest.MonkeyPatch, made: Any, theirs: Any, disable: Any = None) -> Any:
    """An engine with the faulty backend, and with rows of a second rank."""
    patch.setitem(sys.modules, __name__, SimpleNamespace(**globals()))
    patch.setattr(engines, "exchange", lambda what, mine, failure="": [mine, theirs])
    impl = AttentionImpl("vendor.acme", PATH, BackendImplKind.VENDOR, "acme", disable=disable)
    return engine_of(planning(managing(impl)), Worker(made))


def test_a_wrong_backend_of_a_plugin_ends_the_startup_on_all_ranks(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runner({}, {"num_kv_heads": 8}, backend=FaultyBackend)
    engine = planned(monkeypatch, made, theirs := [])
    compare_attention(engine)
    (remark,) = engine.remarks[Moment.CACHED]
    assert "calls of attention on the KV cache in " in remark and "not compared" not in remark
    theirs.append(AttentionRow(("far.attn",), PATH, 20, 3.0, "far.attn, 1 tokens after 5: wrong"))
    with pytest.raises(StartError) as raised:
        compare_attention(engine)
    assert raised.value.failures and "rank 1: implementation 'vendor.acme'" in str(raised.value)
    layers_of(made)[1].impl.fault = "swapped heads"
    with pytest.raises(StartError) as raised:
        compare_attention(engine)
    failed = "implementation 'vendor.acme' failed for op 'attention_backend': model.layers.1"
    assert f"rank 0: {failed}" in str(raised.value)
    assert "VLLM_FL_PER_OP='attention_backend=stock' selects vLLM's code" in str(raised.value)


@pytest.mark.parametrize("fault", ["swapped heads", "an exception"])
def test_a_faulty_backend_disables_its_kernels_if_it_can(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    made = runner({}, backend=FaultyBackend)
    impl = layers_of(made)[0].impl
    impl.fault = fault
    engine = planned(monkeypatch, made, [], lambda impls: setattr(impls[0], "fault", ""))
    compare_attention(engine)
    assert engine.plan.record.demotions and engine.disabled and engine.digest and not impl.fault


def test_vllms_backend_is_not_compared_at_startup(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    impl = AttentionImpl("vendor.acme", "acme.Backend", BackendImplKind.VENDOR, "acme")
    worker = Worker(runner({}))
    monkeypatch.setattr(engines, "exchange", lambda what, mine, failure="": [mine])
    for impls in ([], [impl]):
        engine = engine_of(planning(managing(*impls)), worker)
        compare_attention(engine)
        assert all(line.startswith("0 calls") for line in engine.remarks[Moment.CACHED])
