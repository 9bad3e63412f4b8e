"""A device plugin for hardware without a vLLM platform runs a whole engine, as Ascend's does."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_model
from engine_run import BIND, EngineFailed, Job
from engines import PLUGINS, REFERENCE, difference, run
from flagcx_library import built

import envs

pytestmark = pytest.mark.slow

DEVICE = {**REFERENCE, "VLLM_FL_PLATFORM": "oot_cpu", "VLLM_FL_DISPATCH_DEBUG": "1"}

FLAGCX = {
    "PYTHONPATH": f"{PLUGINS}:{envs.distributions()['vllm-fl-flagcx'] / 'src'}",
    "VLLM_FL_PLUGIN_MODULES": "oot_cpu,vllm_fl_flagcx.plugin",
}
"""FlagCX between them, loaded as a module: its distribution is not installed for these engines."""


def job_for(folder: Path) -> Job:
    return Job(
        model=str(tiny_model.make(folder)),
        batches=[[[3, 17, 170, 99, 41, 7, 250, 12]], [[5 * i + 3, 60, 7, 11, 8] for i in range(4)]],
        new_tokens=6,
        # One rank would have no communicator. In bfloat16 this device's linear kernel rounds
        # tokens unlike vLLM's CPU platform.
        options={"tensor_parallel_size": 2, "dtype": "float32"},
    )


def test_two_ranks_exchange_tensors_through_flagcx(tmp_path: Path) -> None:
    """Stock uses the device's communicator; the tokens are equal."""
    job = job_for(tmp_path)
    library = {"FLAGCX_PATH": str(built(tmp_path / "flagcx"))}
    flagcx = {**DEVICE, **FLAGCX, **library, BIND: "0|1"}
    ours = run(job, timeout=300, **flagcx)
    assert "communicator=default.flagcx" in ours["log"]
    assert "Rank groups: tp:0=default.flagcx (verified)" in ours["log"]
    assert "oot_cpu: communicator FlagcxCommunicator" in ours["log"]
    assert "oot_cpu: all_reduce" not in ours["log"]
    assert "FlagCX 1300 of " in ours["log"]
    assert [rank["groups"]["tp:0"] for rank in ours["report"]] == ["default.flagcx"] * 2
    stock = run(job, timeout=300, **flagcx, VLLM_FL_PER_OP="communicator=stock")
    assert stock["report"][0]["ops"]["communicator"]["impl"] == "stock"
    assert "oot_cpu: all_reduce" in stock["log"]
    assert ours["tokens"] == stock["tokens"]
    assert difference(stock, ours) <= 1e-4


def test_two_devices_on_one_machine_end_the_start_with_both_names(tmp_path: Path) -> None:
    (tmp_path / "second_device.py").write_text(
        "from vllm_fl import DeviceProfile, hookimpl\n"
        "@hookimpl\n"
        "def device():\n"
        "    return DeviceProfile('oot_cpu', 'a.B', 'c.D', detect=lambda: True)\n"
    )
    variables = {
        **DEVICE,
        "PYTHONPATH": f"{PLUGINS}:{tmp_path}",
        "VLLM_FL_PLUGIN_MODULES": "oot_cpu,second_device",
    }
    with pytest.raises(EngineFailed) as failure:
        run(job_for(tmp_path), timeout=300, **variables)
    assert "and 1 other claim this machine's device" in failure.value.log
    assert "'oot_cpu' of oot_cpu, 'oot_cpu' of second_device" in failure.value.log
