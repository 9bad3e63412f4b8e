"""A real model beside a vendor's platform plugin, in the dtype that it is served in."""

from __future__ import annotations

from pathlib import Path

import pytest
import vendors
from engines import IN_ONE_PROCESS, Once
from real_engines import SMOLLM2, Model


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["acme", "forge"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_nothing_changes_until_a_policy_says_so(
    plugin: str, eager: bool, model: Model, once: Once, tmp_path: Path
) -> None:
    path = {"PYTHONPATH": vendors.installed(plugin, tmp_path), **IN_ONE_PROCESS}
    how_it_runs = {"eager": eager, "dtype": "bfloat16", "logits": False}
    told = {
        how: vendors.start(once, plugin, how, model(SMOLLM2), **how_it_runs, **path, **variables)
        for how, variables in (
            ("alone", vendors.ALONE[plugin]),
            ("beside", {}),
            ("silu", {"VLLM_FL_PER_OP": "silu_and_mul=vendor|foreign"}),
        )
    }
    vendors.assert_untouched(told["alone"], told["beside"])
    (served,), (before,) = told["silu"]["served"], told["alone"]["served"]
    assert served.pop("SiluAndMul", 0) == 0 and before.pop("SiluAndMul") > 0
    assert served == before
    assert told["silu"]["report"][0]["calls"]["silu_and_mul"]["vendor.cpu"] > 0
