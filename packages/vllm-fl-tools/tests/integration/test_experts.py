"""vLLM's own experts with tiles that they are told, and the file that vLLM reads."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("vllm")

from vllm_fl.contracts import ModelSizes, contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl_tools.cli import _tiles
from vllm_fl_tools.cli._tuning import Subject
from vllm_fl_tools.engine import bench, tuning
from vllm_fl_tools.integration.experts import OP, Experts

SMALL = Experts(8, 2, 64, 32, torch.bfloat16)
CPU = torch.device("cpu")


def test_calls_have_the_models_own_size() -> None:
    spec = SMALL.spec(contracts()[OP])
    for large in (False, True):
        (sample,) = spec.served(ModelSizes(tokens=(16,)), torch.bfloat16, CPU, large)
        shapes = [tuple(arg.shape) for arg in sample.args[:5]]
        assert shapes == [(16, 64), (8, 64, 64), (8, 64, 32), (16, 2), (16, 2)]
        assert spec.check(*sample.args) is None


@pytest.mark.parametrize("missing", ["experts", "experts_per_token", "expert_intermediate"])
def test_a_model_that_does_not_tell_all_sizes_has_none(missing: str) -> None:
    more: dict[str, float | None] = dict.fromkeys(
        ("experts", "experts_per_token", "expert_intermediate"), 8
    )
    assert Experts.of(ModelSizes(hidden=64, more=more), torch.bfloat16) is not None
    more[missing] = None
    assert Experts.of(ModelSizes(hidden=64, more=more), torch.bfloat16) is None


def test_vllm_takes_the_file_and_the_entry_of_the_nearest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe import fused_moe

    own = SMALL.own(16)
    mine = {**own, "BLOCK_SIZE_N": 128}
    path = SMALL.write(tmp_path / "tiles", {1: own, 16: mine})
    assert json.loads(path.read_text())["16"] == mine
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(path.parent))
    fused_moe.get_moe_configs.cache_clear()
    try:
        assert SMALL.own(20) == mine
        assert SMALL.own(2) == own
    finally:
        fused_moe.get_moe_configs.cache_clear()


def test_a_call_that_fails_leaves_no_configuration_behind() -> None:
    """vLLM's block keeps it after an exception."""
    from vllm.model_executor.layers import fused_moe

    form = SMALL.form(SMALL.own(1))
    with pytest.raises((AttributeError, RuntimeError, TypeError)):
        form.fn(None, None, None, None, None)
    assert fused_moe.get_config() is None


class Timed(Experts):
    """Experts whose kernel takes the time that its tiles say, and is wrong with some of them."""

    now: ClassVar = [0.0]

    def own(self, tokens: int) -> Any:
        return {**super().own(1), "BLOCK_SIZE_N": 64}

    def form(self, tiles: Any) -> OpImpl:
        def run(*args: Any) -> Any:
            self.now[0] += {32: 2e-3, 64: 1e-3, 128: 5e-4}[tiles["BLOCK_SIZE_N"]]
            result = contracts()[OP].oracle(*args).to(args[0].dtype)
            return result + 9.0 if tiles["num_stages"] == 5 else result

        return OpImpl(OP, "stock.vllm", BackendImplKind.REFERENCE, run)


def test_the_search_checks_what_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench, tuning):
        monkeypatch.setattr(module, "cold_bytes", lambda device: 1024)
    experts = Timed(4, 2, 32, 16, torch.float32)
    subject = Subject(
        "m", experts.sizes(8), (8,), "compiled", torch.float32, CPU, frozenset(), largest=1
    )
    found = _tiles.search(
        experts, subject, contracts()[OP], lambda name: nullcontext(), lambda: experts.now[0]
    )
    best = found[1]
    assert best.tiles["BLOCK_SIZE_N"] == 128
    assert best.tiles["num_stages"] != 5, "its results are wrong"
    assert (best.us, best.own_us, best.ratio) == pytest.approx((500, 1000, 2))
