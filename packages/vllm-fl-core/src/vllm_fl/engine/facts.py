"""The facts of an engine's configuration for its plan and verification, read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..plugins.installed import installed_version

if TYPE_CHECKING:
    import torch

    from ..contracts import ModelSizes
    from ..plugins.types import AttentionRequest, CommunicatorRequest, LayerRequest
    from ..settings.policy import Mode
    from ..settings.schema import Settings


@dataclass(frozen=True)
class KernelUse:
    """Layers of a model that vLLM computes with one class.

    Args:
        op: the op of their quantisation scheme; empty if vLLM has no list of classes for them.
        name: the class, for people.
        cls: the class; `NoneType` without an op.
        layers: vLLM's description of a layer, as text -> the names of such layers.
        configs: the same texts -> the descriptions.
    """

    op: str
    name: str
    cls: type
    layers: dict[str, list[str]] = field(default_factory=dict)
    configs: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(map(len, self.layers.values()))

    @property
    def example(self) -> str:
        """The name of a layer."""
        return next(iter(self.layers.values()))[0]


@dataclass(frozen=True)
class EngineFacts:
    """The configuration of one engine; created by `planning.facts_of`.

    The patchers (integration/patchers) provide `attention`, `communicator`, `layers`, `foreign` and
    `linear_notes` in `request`, and `ir_priority` and `passes_off` in `note_user`.

    Args:
        sizes: the model's sizes on one rank; None without a model.
        attention: the request of the model's attention layers; None if unknown.
        communicator: the ranks that a communicator would connect; None for a single rank.
        layers: the request for whole layers, without `layer`. None without a model.
        custom_ops: vLLM's list of custom ops, including our additions.
        ir_priority: op -> the IR providers that the user prefers.
        attention_backend: the attention backend that is set in vLLM, or None.
        linear_notes: op of quantised layers -> the argument of vLLM that overrides it.
        kernels: op of quantised layers -> the classes that vLLM takes on a single rank, from
            the model without weights; under the empty op, those that no order chooses.
        batch_invariant: whether VLLM_BATCH_INVARIANT is set.
        compile_backend: vLLM's compiler backend; empty for its default.
        passes_off: vLLM passes for our ops that the user disabled.
        absent: the ops that the model's configuration excludes, or that no layer of the model runs.
        provided: op -> the dtypes of the parameters that the model's layers provide (parameter ->
            dtype), without duplicates. Ops with no or unknown layers are missing.
        captured: the batch sizes, in tokens, of captured graphs.
        by_range: whether vLLM compiles the model separately for each range of token counts.
        foreign: op -> layer of the op that another vLLM plugin has replaced -> the replacing class
            with its distribution.
        device: the name of the device; empty if it is unknown or if no setting depends on it.
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
    linear_notes: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, Sequence[KernelUse]] = field(default_factory=dict)
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
        """These facts with the settings' orders for the device."""
        settings = self.settings.with_devices(self.device, self.mode)
        return self if settings is self.settings else replace(self, settings=settings)

    def with_checked_table(self) -> EngineFacts:
        """Return these facts, without the orders of a tuning table that does not apply here."""
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
        required = self.settings["require"]
        if required.value == "batch_invariant":
            return required.named
        return "VLLM_BATCH_INVARIANT=1" if self.batch_invariant else ""

    def custom_op_note(self, registered: str) -> str:
        """Return the user's `custom_ops` entry that keeps this layer in vLLM, or empty. In compiled
        mode, `none` is vLLM's default and not a choice of the user."""
        if f"-{registered}" in self.custom_ops:
            return f"custom_ops has -{registered}"
        is_off = "none" in self.custom_ops and f"+{registered}" not in self.custom_ops
        return "custom_ops has none" if is_off and self.mode == "eager" else ""
