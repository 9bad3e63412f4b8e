"""Where vLLM asks for an attention backend."""

from __future__ import annotations

from ...contracts.binding import AttentionPlace, Binding

__all__ = ["BINDING"]

BINDING = Binding(
    places=(AttentionPlace(),),
    not_reached=(
        "layers for which vLLM is told a backend: --attention-backend, a backend per kind of "
        "layer, a model's or a drafter's own",
        "attention that asks no platform: Mamba and linear attention, vision encoders, models "
        "that bring their own backend",
    ),
)
