"""The platform, worker and communicator for vLLM, tested without an NPU."""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils.dispatcher import _kernel_arg_names
from vllm.v1.worker.block_table import ComputeSlotMappingKernel

from vllm_fl_ascend.communicator import AscendCommunicator
from vllm_fl_ascend.platform import AscendPlatform
from vllm_fl_ascend.slots import compute_slot_mapping


@pytest.fixture
def platform() -> Any:
    return AscendPlatform()


def test_what_does_not_run_is_refused_by_name(platform: Any) -> None:
    platform.check_if_supports_dtype(torch.bfloat16)
    with pytest.raises(ValueError, match="float64"):
        platform.check_if_supports_dtype(torch.float64)
    with pytest.raises(ValueError, match="does not support fp8 quantization"):
        platform.verify_quantization("fp8")
    with pytest.raises(ValueError, match="vllm-fl explain attention_backend"):
        platform.get_attn_backend_cls(None, None)


def config(**model: Any) -> Any:
    """The fields of a VllmConfig that the platform changes, with vLLM's defaults."""
    return SimpleNamespace(
        model_config=SimpleNamespace(**{"enforce_eager": False, **model}),
        cache_config=SimpleNamespace(block_size=16, user_specified_block_size=False),
        compilation_config=SimpleNamespace(
            mode=CompilationMode.VLLM_COMPILE,
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=[1, 2],
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        parallel_config=SimpleNamespace(
            disable_custom_all_reduce=False, data_parallel_size=1, assigned_physical_gpu_ids=None
        ),
        use_v2_model_runner=False,
        speculative_config=None,
    )


def test_it_runs_eagerly_with_blocks_of_128_and_says_so_in_one_line(
    platform: Any, caplog: pytest.LogCaptureFixture
) -> None:
    changed = config()
    with caplog.at_level(logging.INFO, "vllm_fl.engine"):
        platform.check_and_update_config(changed)
    assert changed.compilation_config.mode is CompilationMode.NONE
    assert changed.compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    assert changed.compilation_config.cudagraph_capture_sizes == []
    assert changed.model_config.enforce_eager is True
    assert changed.cache_config.block_size == 128
    assert changed.scheduler_config.async_scheduling is False
    assert changed.parallel_config.disable_custom_all_reduce is True
    (line,) = [record.getMessage() for record in caplog.records]
    assert "without torch.compile and graphs" in line
    assert "\n" not in line


def test_explicit_eager_mode_or_blocks_are_kept_without_a_log_line(
    platform: Any, caplog: pytest.LogCaptureFixture
) -> None:
    asked = config(enforce_eager=True)
    asked.cache_config = SimpleNamespace(block_size=64, user_specified_block_size=True)
    with caplog.at_level(logging.INFO, "vllm_fl.engine"):
        platform.check_and_update_config(asked)
    assert caplog.records == []
    assert asked.cache_config.block_size == 64


def test_the_model_runner_is_vllm_s_first(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    platform.apply_config_platform_defaults(None)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    platform.apply_config_platform_defaults(None)
    asked = config()
    asked.use_v2_model_runner = os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    with pytest.raises(ValueError, match="unset VLLM_USE_V2_MODEL_RUNNER"):
        platform.check_and_update_config(asked)


def test_drafts_and_other_npus_than_the_rank_s_are_refused(platform: Any) -> None:
    others = [{"data_parallel_size": 2}, {"assigned_physical_gpu_ids": [4, 5]}]
    for asked in others:
        changed = config()
        vars(changed.parallel_config).update(asked)
        with pytest.raises(ValueError, match="select the NPUs with ASCEND_RT_VISIBLE_DEVICES"):
            platform.check_and_update_config(changed)
    changed = config()
    changed.speculative_config = object()
    with pytest.raises(ValueError, match="not support speculative decoding"):
        platform.check_and_update_config(changed)


@pytest.mark.parametrize("padded", [0, 3])
def test_slots_are_those_of_vllm_s_kernel(padded: int) -> None:
    """Compared with vLLM's C++ version of its Triton kernel."""
    CpuPlatform.import_kernels()
    from vllm.utils.cpu_triton_utils import _compute_slot_mapping_kernel_impl as expected

    lengths, before = [5, 1, 200, 3], [0, 127, 128, 250]
    starts = torch.tensor([0, 5, 6, 206, 209], dtype=torch.int32)
    positions = torch.cat([torch.arange(a, a + n) for n, a in zip(lengths, before, strict=True)])
    table = torch.randperm(32, dtype=torch.int32).view(4, 8)
    slots = []
    for function in (expected, compute_slot_mapping):
        mapping = torch.full((209 + padded,), -7)
        arguments = (209, 209 + padded, starts, positions, table, 8, mapping, 128, 1, 0, 1, -1)
        function(*arguments, 1024)
        slots.append(mapping)
    assert torch.equal(*(mapping[:209] for mapping in slots))
    assert slots[1][209:].eq(-1).all()  # like the Triton kernel, unlike the C++ one
    with pytest.raises(NotImplementedError, match="context parallelism"):
        compute_slot_mapping(*arguments[:8], 2, 0, 1, -1, 1024)


def test_its_parameters_are_the_kernel_s() -> None:
    """vLLM passes them by name if the names match, else by position."""
    kernel = inspect.getattr_static(ComputeSlotMappingKernel, "kernel").__func__
    assert tuple(inspect.signature(compute_slot_mapping).parameters) == _kernel_arg_names(kernel)


def gathered(rank: int, file: str, results: Any) -> None:
    """One rank of two, which gathers to rank 1 of the group."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    group = dist.group.WORLD
    dist.gather = None  # HCCL does not have it
    mine = AscendCommunicator(group, torch.device("cpu"), group)
    found = mine.gather(torch.full((2, 3), float(rank)), dst=1, dim=-1)
    results.put((rank, None if found is None else found.tolist()))
    dist.destroy_process_group()


def test_gather_needs_no_gather_of_hccl(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # need not import vLLM again
    results = context.Queue()
    ranks = [
        context.Process(target=gathered, args=(rank, str(tmp_path / "store"), results))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    assert found == {0: None, 1: [[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]] * 2}
