"""What this distribution brings: the plugin that the entry point `flaggems` names."""

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

from .attention_request import supports_attention
from .impl import (
    DEFAULT,
    activation,
    experts,
    gated_delta,
    gated_linear,
    linear,
    linear_fp8,
    normalization,
    paging,
    qk_norm_rope,
    quantisation,
    rotary,
    routing,
)
from .loading import available
from .settings import BLACKLIST, SETTINGS, findings, rejected

__all__ = [
    "KERNEL_DISTRIBUTIONS",
    "attention_backend",
    "doctor",
    "policy",
    "register_ops",
    "rejections",
    "settings",
    "worker_start",
]

KERNEL_DISTRIBUTIONS = ("flag-gems",)
"""Whose code runs here: core puts it into the digest of an engine's plan."""

POLICY = Path(__file__).with_name("cuda.yaml")

MODULES = (
    activation,
    experts,
    gated_delta,
    gated_linear,
    linear,
    linear_fp8,
    normalization,
    paging,
    qk_norm_rope,
    quantisation,
    rotary,
    routing,
)
"""Those that bring ops, by theme."""


@hookimpl
def register_ops() -> list[OpImpl]:
    """The ops as `default.flagos`; available with FlagGems and a device that it supports."""
    return [impl for module in MODULES for impl in module.OPS]


@hookimpl
def attention_backend() -> list[AttentionImpl]:
    """FlagGems's attention, as a backend of vLLM's v1 engine."""
    return [
        AttentionImpl(
            DEFAULT[0],
            "vllm_fl_flaggems.impl.attention.AttentionFLBackend",
            DEFAULT[1],
            available=available,
            supports=supports_attention,
        )
    ]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """What was measured on classes of NVIDIA's devices."""
    return PolicyDefaults(POLICY) if platform == "cuda" else None


@hookimpl
def settings() -> tuple[SettingSpec[Any], ...]:
    """Whether FlagGems is used, its two lists, and where its replaced operators are listed."""
    return tuple(replace(spec, known=_known) if spec is BLACKLIST else spec for spec in SETTINGS)


def _known() -> Collection[str]:
    """What of the blacklist stands for operators of PyTorch's."""
    from .aten import replaceable

    return replaceable()


@hookimpl
def rejections(
    settings: Any, op: str, impls: Sequence[OpImpl | AttentionImpl | CommunicatorImpl]
) -> dict[str, str] | None:
    """The ops that the settings keep FlagGems out of."""
    return rejected(settings, op, impls)


@hookimpl
def doctor(settings: Any) -> Iterator[Finding]:
    """A FlagGems that is missing or lacks Triton, and settings of it without effect."""
    return findings(settings)


@hookimpl
def worker_start(context: WorkerContext) -> WorkerReport | None:
    """Replace PyTorch's operators by FlagGems's, as the settings say.

    Whether kernels begin early is reported, since code that was compiled for the one is not the
    other's, and no cache of vLLM's knows the variable.
    """
    from .aten import start
    from .impl.linear import begins_early

    report = start(context)
    if not begins_early(context.device):
        return report
    lines, facts = (report.lines, report.facts) if report else ((), {})
    return WorkerReport(lines, {**facts, "begins early": True})
