"""vLLM's platforms for AMD and Intel GPUs, emulated: vllm-fl wraps them and plans. Calls to their
drivers are stubbed, so configurations are made as on such a machine. No engine runs."""

from __future__ import annotations

import pytest
from engines import Model, answer_of

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, types

def module(name, **names):
    made = sys.modules[name] = types.ModuleType(name)
    made.__dict__.update(names)

def rocm():
    import torch
    class AmdSmiException(Exception):
        pass
    if not torch.cpu._is_avx512_supported():
        module("vllm._C")  # which ends the process there, and a ROCm build has another one
    info = {"target_graphics_version": "gfx942", "device_id": "0x74a1", "market_name": "MI300X"}
    handles = lambda: [1]
    names = (
        "amdsmi_get_gpu_device_uuid amdsmi_topo_get_link_type amdsmi_topo_get_numa_node_number"
    ).split()
    module(
        "amdsmi",
        AmdSmiException=AmdSmiException,
        AmdSmiMemoryType=types.SimpleNamespace(VRAM=0),
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=handles,
        amdsmi_get_gpu_asic_info=lambda handle: info,
        amdsmi_get_gpu_memory_total=lambda handle, kind: 192 << 30,
        **dict.fromkeys(names, lambda *args: 0),
    )

def xpu():
    import torch
    module("vllm_xpu_kernels")
    for name in ("_C", "_moe_C", "_xpu_C"):
        module(f"vllm_xpu_kernels.{name}")
    torch.xpu.is_available = lambda: True
    torch.xpu.get_device_name = lambda device=0: "Intel Data Center GPU Max 1550"
    properties = types.SimpleNamespace(total_memory=64 << 30, max_compute_units=512)
    torch.xpu.get_device_properties = lambda device=0: properties

{"rocm": rocm, "xpu": xpu}[sys.argv[2]]()

import json
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

args = EngineArgs(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True)
config = args.create_engine_config()
path = lambda cls: f"{cls.__module__}.{cls.__qualname__}"
from vllm_fl.integration.planning import facts_of, plan_for

plan = plan_for(facts_of(config))
print(json.dumps({
    "platform": [path(base) for base in type(current_platform).__mro__],
    "enum": current_platform._enum.name,
    "name": type(current_platform).vllm_fl_platform,
    "worker": config.parallel_config.worker_cls,
    "ops": {op: entry.to_json() for op, entry in plan.entries.items()},
}))
"""


@pytest.mark.parametrize(
    ("platform", "cls", "worker"),
    [
        ("rocm", "vllm.platforms.rocm.RocmPlatform", "gpu_worker:Worker"),
        ("xpu", "vllm.platforms.xpu.XPUPlatform", "xpu_worker:XPUWorker"),
    ],
)
def test_it_is_planned_and_not_stepped_aside_from(
    platform: str, cls: str, worker: str, model: Model
) -> None:
    order = {"VLLM_FL_PER_OP": "silu_and_mul=reference"}
    became, log = answer_of(SCRIPT, model("qwen3"), platform, **order)
    assert became["platform"][1:3] == ["vllm_fl.integration.platform.PlatformOverlay", cls]
    assert became["enum"] == platform.upper() and became["name"] == platform
    assert became["worker"].startswith("vllm_fl.integration.worker.Planned:")
    assert became["worker"].endswith(worker)
    assert became["ops"]["silu_and_mul"]["impl"] == "reference.torch"
    assert "vllm-fl is disabled" not in log
