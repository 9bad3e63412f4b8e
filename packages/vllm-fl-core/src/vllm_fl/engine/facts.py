"""What an engine's configuration says, read once: what the plan and its verification go by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..plugins.installed import installed_version

if TYPE_CHECKING:
    import torch

    from ..contracts import ModelSizes
    from ..plugins.types import AttentionRequest, CommunicatorRequest, LayerRequest
    from ..settings.policy import Mode
    from ..settings.schema import Settings


@dataclass(frozen=True)
class EngineFacts:
    """One engine, as its configuration describes it; `planning.facts_of` makes it.

    Args:
        settings: vllm-fl's settings, policy included.
        mode: how the engine runs the model.
        dtype: the model's; None without a model.
        sizes: the model's sizes on one rank; None without a model.
        attention: what the model's layers will ask of attention; None if that is unknown (from
            `Attention.request` in integration/patchers, as the next two and `foreign` are from the
            `request` of their patchers).
        communicator: the ranks that a communicator would connect; None for a single rank.
        layers: what whole layers are asked with, `layer` apart; None without a model.
        custom_ops: vLLM's list of custom ops, what we added to it included.
        ir_priority: the IR providers that the user set vLLM to prefer, by op (from `Ir.note_user`).
        attention_backend: the name of the attention backend that vLLM was told to take, or None.
        batch_invariant: whether vLLM was told to use its batch-invariant kernels.
        compile_backend: what vLLM compiles the model with; empty for its default.
        passes_off: vLLM's passes that the user turned off, of those that find an op of ours (from
            `Fusions.note_user`).
        absent: the ops that the model cannot have, as their bindings read its configuration, and
            those that only layers run, of which it has none.
        provided: op -> the dtypes of what the model's layers provide for it (parameter -> dtype),
            each set of them once; an op that is not in it has no layers, or they are not known.
        captured: the batches, in tokens, of which vLLM captures graphs.
        by_range: whether vLLM compiles the model for each range of token counts apart, and runs its
            passes over the graphs.
        foreign: op -> its layers that another plugin of vLLM's has replaced -> whose they are.
        device: the name of the device; empty if no setting is for one, or it is not known.
    """

    settings: Settings
    mode: Mode
    dtype: torch.dtype | None = None
    sizes: ModelSizes | None = None
    attention: AttentionRequest | None = None
    communicator: CommunicatorRequest | None = None
    layers: LayerRequest | None = None
    custom_ops: tuple[str, ...] = ()
    ir_priority: Mapping[str, Sequence[str]] = field(default_factory=dict)
    attention_backend: str | None = None
    batch_invariant: bool = False
    compile_backend: str = ""
    passes_off: Sequence[str] = ()
    absent: frozenset[str] = frozenset()
    provided: Mapping[str, tuple[Mapping[str, torch.dtype], ...]] = field(default_factory=dict)
    captured: tuple[int, ...] = ()
    by_range: bool = False
    foreign: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    device: str = ""

    @property
    def ordered(self) -> EngineFacts:
        """Return these facts with the orders for the device among the settings."""
        settings = self.settings.with_devices(self.device, self.mode)
        return self if settings is self.settings else replace(self, settings=settings)

    def with_checked_table(self) -> EngineFacts:
        """Return these facts without the orders of a table that does not hold here."""
        table = self.settings.tuned
        if table is None:
            return self
        why = table.differs(self.device, installed_version)
        if not why and not any(
            order.of_table and order.order.rows(self.mode)
            for orders in self.settings.by_device.values()
            for order in orders
        ):
            why = f"it has no orders for {self.mode} engines"
        return replace(self, settings=self.settings.without_table(why)) if why else self

    @property
    def wants_invariance(self) -> str:
        """The setting by which only batch-invariant implementations may serve, or nothing."""
        required = self.settings["require"]
        if required.value == "batch_invariant":
            return required.named
        return "VLLM_BATCH_INVARIANT=1" if self.batch_invariant else ""

    def custom_op_note(self, registered: str) -> str:
        """The entry of `custom_ops` by which the user keeps this layer as it is, or nothing.

        In compiled mode `none` is vLLM's own default and says nothing of the user.

        Args:
            registered: vLLM's registered name of the layer.
        """
        if f"-{registered}" in self.custom_ops:
            return f"custom_ops has -{registered}"
        is_off = "none" in self.custom_ops and f"+{registered}" not in self.custom_ops
        return "custom_ops has none" if is_off and self.mode == "eager" else ""
