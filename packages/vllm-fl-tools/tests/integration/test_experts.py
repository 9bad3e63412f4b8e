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
    spec = SMALL.spec(contracts()[OP], CPU)
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


def test_what_the_oracle_says_of_the_models_calls_is_the_contracts_own() -> None:
    spec = SMALL.spec(contracts()[OP], CPU)
    (sample,) = spec.served(ModelSizes(tokens=(16,)), torch.bfloat16, CPU, False)
    assert (spec.name, spec.parameters) == (OP, contracts()[OP].parameters)
    assert torch.equal(spec.oracle(*sample.args), contracts()[OP].oracle(*sample.args))
    with pytest.raises((NotImplementedError, RuntimeError)):
        SMALL.spec(contracts()[OP], torch.device("meta")).oracle(*sample.args)


class Timed(Experts):
    """Experts whose kernel takes the time that its tiles say, is wrong with some of them, and
    cannot be launched with others."""

    now: ClassVar = [0.0]

    def own(self, tokens: int) -> Any:
        return {**super().own(1), "BLOCK_SIZE_N": 64}

    def form(self, tiles: Any) -> OpImpl:
        def run(*args: Any) -> Any:
            if tiles["num_warps"] == 8:
                raise RuntimeError("out of resource: shared memory")
            self.now[0] += {32: 2e-3, 64: 1e-3, 128: 5e-4, 256: 5e-4}[tiles["BLOCK_SIZE_N"]]
            result = contracts()[OP].oracle(*args).to(args[0].dtype)
            return result + 9.0 if tiles["num_stages"] == 5 else result

        return OpImpl(OP, "stock.vllm", BackendImplKind.REFERENCE, run)


def test_the_search_checks_what_it_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert (best.tiles["num_warps"], best.cut_short) == (4, False), "8 cannot be launched"
    path = _tiles.write(experts, str(tmp_path), found)
    file = json.loads(path.read_text())
    assert file.pop("triton_version")
    assert file == {str(n): one.tiles for n, one in found.items()}
    _tiles.shown(path, found)
    rows = capsys.readouterr().out.splitlines()
    assert rows[2].split()[-4:] == ["500.0", "1000.0", "2.00", str(best.tried)]
    assert _tiles.told(path, found)["entries"]["1"]["tried"] == best.tried > 9
