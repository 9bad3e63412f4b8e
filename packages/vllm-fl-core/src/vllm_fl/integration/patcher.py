"""The base of the patchers. Each replaces one kind of target in vLLM for the plan of an engine.

`patching.py` lists the patchers. The methods are in the order in which `planning` and `worker` call
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from ..contracts.targets import Target
from .targets import installed_bindings, targets

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from ..engine.facts import EngineFacts
    from ..engine.plan import Plan
    from ..plugins.inspection import Key
    from ..settings.schema import Settings
    from .engines import Engine


class WhyNot(NamedTuple):
    """Why a patcher does not replace targets in an engine, regardless of the policy.

    Attributes:
        ops: op -> why vLLM keeps the whole op.
        impls: (op, impl id) -> why the implementation does not support the engine.
        layers: names of layer classes of vLLM that settings exclude.
    """

    ops: Mapping[str, str] = {}
    impls: Mapping[Key, str] = {}
    layers: Sequence[str] = ()


class Patcher:
    """Replaces one kind of target. By default its methods have no effect. `kind` is the class of
    its targets, if bindings declare such targets."""

    kind: type[Target] | None = None

    def ops(self) -> Set[str]:
        """Return the ops that have a target of this kind in the installed vLLM."""
        if self.kind is None:
            return frozenset()
        return {op for op, _ in targets(installed_bindings(), self.kind)}

    def layer_names(self) -> frozenset[str]:
        return frozenset()

    def note_user(self, vllm_config: VllmConfig) -> Mapping[str, Any]:
        """Return fields of `EngineFacts` from user settings that vLLM overwrites later. The fields
        become part of the configuration, so use lists instead of tuples."""
        return {}

    def request(
        self, vllm_config: VllmConfig, settings: Settings, /, *, compiled: bool
    ) -> Mapping[str, Any]:
        """Return the fields of `EngineFacts` that the patcher reads from a configuration. The
        configuration's `model_config` may be None."""
        return {}

    def opening(self, engine: Engine) -> AbstractContextManager[object]:
        """Return the context for opening the device and making vLLM's rank groups."""
        return nullcontext()

    def why_not(self, facts: EngineFacts) -> WhyNot:
        """Return why targets are not replaced in this engine."""
        return WhyNot()

    def keep_stock(self, plan: Plan) -> Mapping[str, str]:
        """Return planned op -> why it must stay stock because of other planned ops."""
        return {}

    def configure(
        self, plan: Plan, vllm_config: VllmConfig, entry: MutableMapping[str, Any]
    ) -> Iterable[str]:
        """Change the configuration for a plan, and undo changes for an earlier plan. `entry` keeps
        a record of the changes. Returns the custom ops to enable, by vLLM's names."""
        return ()

    def contents(self, plan: Plan) -> Mapping[str, Any]:
        """Return facts about code of other plugins that runs under the plan, for its digest."""
        return {}

    def faults(self, plan: Plan, facts: EngineFacts) -> Mapping[Key, str]:
        """Import the planned classes. Return why a class cannot be used in this process."""
        return {}

    def choose(self, engine: Engine) -> Mapping[str, Any]:
        """Choose the targets to replace. Return the part of the choice that belongs to the plan's
        digest."""
        return {}

    def apply(self, engine: Engine) -> None:
        """Replace the chosen targets until the plan is unbound (`Engine.on_unbind`)."""

    def building(self, engine: Engine) -> AbstractContextManager[object]:
        """Return the context for building the model."""
        return nullcontext()

    def bind(self, engine: Engine, model: torch.nn.Module) -> None:
        """Bind an already built model to the engine's new plan."""

    def stale(self, engine: Engine) -> bool:
        """Return whether vLLM must load the model again, because the plan has changed since it was
        built, and `bind` cannot change it. The answer is the same on all ranks."""
        return False

    def loaded(self, engine: Engine) -> None:
        """Report on the loaded model."""

    def compiled(self, engine: Engine) -> None:
        """Report on the compiled model after vLLM's warm-up."""

    def report(self, engine: Engine) -> Mapping[str, Any]:
        """Return top-level keys of the worker's report."""
        return {}
