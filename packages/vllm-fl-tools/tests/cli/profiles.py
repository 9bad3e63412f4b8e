"""Shortened profiles of workers, and the matching engine reports."""

from __future__ import annotations

from typing import Any

LINEAR = "vllm-fl/layer/QKVParallelLinear"
NORM = "vllm-fl/layer/RMSNorm"
NORM_OP = "vllm-fl/op/rms_norm/vendor.cpu"
FUSED_NORM = "graph_1_cpp_fused__to_copy_add_mean_mul_onednn_mm_pow_rsqrt_6"


def places(**fields: Any) -> dict[str, Any]:
    """An engine's names -> ops."""
    return {
        "layers": {"RMSNorm": "rms_norm", "SiluAndMul": "silu_and_mul", "Rope": "rope"},
        "operators": {
            "_C::rms_norm": "rms_norm",
            "_C::silu_and_mul": "silu_and_mul",
            "aten::mm": "linear",
        },
        "ours": {"vllm_fl::rms_norm_vendor_cpu_0123": ["rms_norm", "vendor.cpu"]},
        "kernels": {FUSED_NORM: ["RMSNorm"]},
        "attention": ["CPU_ATTN"],
        "left": [],
        "device": "cpu",
        "ranks": 1,
        **fields,
    }


def report(**ops: Any) -> dict[str, Any]:
    plan = {
        "rms_norm": {"impl": "vendor.cpu", "reason": "the order lists vendor"},
        "silu_and_mul": {
            "impl": "stock",
            "reason": "the order lists stock (vendor.acme: not there)",
        },
        "attention_backend": {"impl": "stock", "reason": "the order lists stock"},
        "linear": {"impl": "stock", "reason": "the order lists stock"},
        **ops,
    }
    return {"ops": plan, "mode": "eager", "digest": "0123"}


def on_host(*seen: tuple[float, int, tuple[str, ...]], steps: int = 2) -> dict[str, Any]:
    """A profile of the host's operators: (µs, calls, path) of all steps."""
    return {
        "steps": steps,
        "problem": "",
        "paths": [list(path) for *_, path in seen],
        "host": [[number, us, calls] for number, (us, calls, _) in enumerate(seen)],
        "kernels": [],
        "busy": 0.0,
    }


def on_device(
    busy: float, *launches: tuple[float, int, str, tuple[str, ...] | None], steps: int = 1
) -> dict[str, Any]:
    """A profile of a device's kernels: (µs, calls, kernel, path or None) of all steps."""
    paths = [path for *_, path in launches if path is not None]
    seen = on_host(*((1.0, 1, path) for path in paths), steps=steps)
    kernels = [
        [None if path is None else paths.index(path), name, us, calls]
        for us, calls, name, path in launches
    ]
    return {**seen, "kernels": kernels, "busy": busy}
