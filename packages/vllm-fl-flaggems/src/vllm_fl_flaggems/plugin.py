"""The FlagGems plugin: one function for each hook."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_fl import (
    AttentionImpl,
    CommunicatorImpl,
    Finding,
    OpImpl,
    PolicyDefaults,
    SettingSpec,
    WorkerContext,
    WorkerReport,
    hookimpl,
)

from .attention_request import supports_attention, supports_decode
from .impl import (
    FLAGOS,
    activation,
    cache_writes,
    experts,
    gated_delta,
    gated_linear,
    linear,
    linear_fp8,
    normalization,
    qk_norm_rope,
    quantisation,
    rotary,
    routing,
)
from .loading import available
from .settings import BLACKLIST, SETTINGS, findings, rejected

KERNEL_DISTRIBUTIONS = ("flag-gems",)
"""pip distributions of the kernels' code; core hashes their versions into the plan's digest."""

POLICY = Path(__file__).with_name("cuda.yaml")

MODULES = (
    activation,
    experts,
    gated_delta,
    gated_linear,
    linear,
    linear_fp8,
    normalization,
    cache_writes,
    qk_norm_rope,
    quantisation,
    rotary,
    routing,
)
"""Modules with an `OPS` tuple."""


@hookimpl
def register_ops() -> list[OpImpl]:
    """Ops as `default.flagos`, available if FlagGems and a device that it supports are present."""
    return [impl for module in MODULES for impl in module.OPS]


@hookimpl
def attention_backend() -> list[AttentionImpl]:
    """FlagGems's attention backend for vLLM's v1 engine, and vLLM's with a kernel for decoding."""
    return [
        AttentionImpl(
            FLAGOS[0],
            "vllm_fl_flaggems.impl.attention.AttentionFLBackend",
            FLAGOS[1],
            available=available,
            supports=supports_attention,
        ),
        AttentionImpl(
            "flagos.decode",
            "vllm_fl_flaggems.impl.decode_attention.DecodeBackend",
            FLAGOS[1],
            available=available,
            supports=supports_decode,
            priority=100,
            disable=disable_decode,
        ),
    ]


def disable_decode(impls: list[Any]) -> None:
    """Run vLLM's kernels in attention layers with the kernel for decoding steps."""
    from .impl.decode_attention import DecodeImpl

    for impl in impls:
        if isinstance(impl, DecodeImpl):
            impl.decodes = False


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """Default orders, measured on NVIDIA GPUs."""
    return PolicyDefaults(POLICY) if platform == "cuda" else None


@hookimpl
def settings() -> tuple[SettingSpec[Any], ...]:
    """FlagGems's settings: on/off switch, whitelist, blacklists, path of the operator list."""
    return tuple(replace(spec, known=_known) if spec is BLACKLIST else spec for spec in SETTINGS)


def _known() -> Collection[str]:
    """Return blacklist entries that are PyTorch operators."""
    from .aten import replaceable

    return replaceable()


@hookimpl
def rejections(
    settings: Any, op: str, impls: Sequence[OpImpl | AttentionImpl | CommunicatorImpl]
) -> dict[str, str] | None:
    """Return the implementations that the settings disable for `op`, with the setting's name."""
    return rejected(settings, op, impls)


@hookimpl
def doctor(settings: Any) -> Iterator[Finding]:
    """Report missing FlagGems or Triton, and FlagGems settings that have no effect."""
    return findings(settings)


@hookimpl
def worker_start(context: WorkerContext) -> WorkerReport | None:
    """Replace PyTorch operators by FlagGems, as configured.

    Reports whether kernels begin early (`begins_early`), because compiled code depends on that, and
    the key of vLLM's compile cache does not include it.
    """
    from .aten import replace_operators
    from .impl.linear import begins_early

    report = replace_operators(context)
    if not begins_early(context.device):
        return report
    lines, facts = (report.lines, report.facts) if report else ((), {})
    return WorkerReport(lines, {**facts, "begins early": True})
