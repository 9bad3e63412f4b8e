"""Implementations, managers, plans and engines for tests; results identify the implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from vllm_fl.contracts import ModelSizes, OpSpec
from vllm_fl.contracts.binding import put
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.startup import Startup
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan, make_plan
from vllm_fl.errors import StartError
from vllm_fl.plugins.discovery import discover
from vllm_fl.plugins.hookspecs import hookimpl
from vllm_fl.plugins.loading import load
from vllm_fl.plugins.plugin import Kind, Owner, Plugin
from vllm_fl.plugins.registry import OpRegistry, known_contracts
from vllm_fl.plugins.setting import SettingSpec
from vllm_fl.plugins.types import BackendImplKind, Impl, OpImpl
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.policy import Mode, SelectionPolicy
from vllm_fl.settings.schema import Settings

X = torch.ones(2, 8)


def _listing(name: str, default: Any, **fields: Any) -> SettingSpec[Any]:
    variable, how = f"VLLM_FL_{name.upper()}", {"in_file": True, "names": "FlagGems op"}
    return SettingSpec(name, variable, default, **how, **fields)


PLUGIN_SETTINGS: tuple[SettingSpec[Any], ...] = (
    SettingSpec("use_flaggems", "USE_FLAGGEMS", True),
    _listing("flagos_whitelist", None, excludes="flagos_blacklist"),
    _listing("flagos_blacklist", ()),
    _listing("flagos_blacklist_append", ()),
    SettingSpec("oplist_path", "FLAGGEMS_ENABLE_OPLIST_PATH", "/tmp/flaggems_enable_oplist.txt"),
)
"""Settings declared by a plugin other than core, as FlagGems users have them."""


class _Settings:
    """A plugin that declares these settings and rejects implementations by them."""

    @hookimpl
    def settings(self) -> tuple[SettingSpec[Any], ...]:
        return PLUGIN_SETTINGS

    @hookimpl
    def rejections(self, settings: Any, op: str, impls: Any) -> dict[str, str] | None:
        ids = [impl.impl_id for impl in impls if impl.kind is BackendImplKind.DEFAULT]
        if not settings["use_flaggems"].value:
            return dict.fromkeys(ids, "USE_FLAGGEMS=false")
        listed = op in settings["flagos_blacklist"].value
        return dict.fromkeys(ids, "flagos_blacklist") if listed else None


def registry_with_settings(*impls: Impl) -> OpRegistry:
    """A registry with `impls` and the plugin that declares `PLUGIN_SETTINGS`."""
    registry = OpRegistry()
    load(registry, [Plugin(Owner("settings"), "settings", _Settings)])
    registry.register_many(impls)
    return registry


def half(x: torch.Tensor) -> torch.Tensor:
    return x[..., : x.shape[-1] // 2].clone()


def kind_of(impl_id: str) -> tuple[BackendImplKind, str | None]:
    head, _, name = impl_id.partition(".")
    return BackendImplKind[head.upper()], name if head == "vendor" else None


def silu(impl_id: str, mark: float = 0.0, **fields: Any) -> OpImpl:
    """A `silu_and_mul` that returns half of x plus `mark`."""

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        return half(x) + mark

    kind, vendor = kind_of(impl_id)
    fn = fields.pop("fn", silu_and_mul)
    return OpImpl("silu_and_mul", impl_id, kind, fn, vendor, fields.pop("priority", None), **fields)


def failing(impl_id: str, error: BaseException, **fields: Any) -> OpImpl:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        raise error

    return silu(impl_id, fn=silu_and_mul, **fields)


def refusing(impl_id: str, reason: str, **fields: Any) -> OpImpl:
    """A `silu_and_mul` that supports no call, for `reason`."""
    return silu(impl_id, supports=lambda x: reason, **fields)


def norm(
    impl_id: str,
    fn: Callable[..., Any],
    verdict: Callable[[], bool | str] = lambda: True,
    **fields: Any,
) -> OpImpl:
    """A `rms_norm` that calls fn(x, residual); its `supports` returns `verdict()`."""

    def rms_norm(
        x: Any, residual: Any, weight: Any, epsilon: float, variance_size: Any = None
    ) -> Any:
        return fn(x, residual)

    def supports(
        x: Any, residual: Any, weight: Any, epsilon: float, variance_size: Any = None
    ) -> bool | str:
        return verdict()

    kind, vendor = kind_of(impl_id)
    return OpImpl("rms_norm", impl_id, kind, rms_norm, vendor, supports=supports, **fields)


def planning(
    manager: OpManager,
    mode: Mode = "eager",
    *,
    sizes: ModelSizes | None = None,
    foreign: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    **fields: Any,
) -> Plan:
    """Plan for an engine with the manager's policy."""
    settings = load_settings({})
    vars(settings)["policy"] = manager.policy
    facts = EngineFacts(settings, mode, sizes=sizes, foreign=foreign)
    return make_plan(manager, facts, **fields)


def plan_of(*impls: Impl, order: Any = None, **changed: Any) -> Plan:
    """Eager plan with these implementations of `silu_and_mul`, and with `changed` fields."""
    orders = {"silu_and_mul": order} if order else {}
    return replace(planning(managing(*impls, per_op_order=orders)), **changed)


@cache
def engine_of(plan: Plan, worker: Any = None) -> Any:
    from vllm_fl.integration.engines import Engine  # imports vLLM

    if worker is None:
        config = SimpleNamespace(quant_config=None, speculative_config=None)
        worker = SimpleNamespace(vllm_config=config)
    engine = Engine(EngineFacts(load_settings({}), plan.mode), 0, worker)
    engine.plan, engine.device = plan, torch.device("cpu")
    return engine


@contextmanager
def taking(plan: Plan, bindings: Any, *patchers: Any, dtype: Any = torch.float32) -> Iterator[Any]:
    """Run an engine with this plan in this thread; yield each patcher's choice."""
    from vllm_fl.integration.engines import calling  # imports vLLM

    engine = engine_of(plan)
    chosen = [patcher.choice(plan, bindings, engine.device, dtype) for patcher in patchers]
    for patcher, each in zip(patchers, chosen, strict=True):
        patcher.take(engine, each)
    try:
        with calling(engine):
            yield chosen if len(chosen) > 1 else chosen[0]
    finally:
        engine.unbind()


class BoundLayer(torch.nn.Module):
    """A layer that binds `silu_and_mul` when it is built, like vLLM's layers."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.bound = plan.bind("silu_and_mul", self, frozenset())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.bound(x)
        return result


def rank_failed(failure: str) -> StartError:
    """The error of `exchange` after a failure on any rank."""
    return StartError(f"vllm-fl: engine startup failed: {failure}", failures=(failure,))


def extended(manager: OpManager) -> OpManager:
    """Load the installed extensions, such as verification, into the manager."""
    found = [each for each in discover() if each.kind == "extension"]
    load(manager.registry, found)
    return manager


def found(distribution: str | None, content: Any = None, kind: Kind = "contracts") -> Plugin:
    """The plugin of a distribution; without `content` it must not be imported."""

    def import_it() -> Any:
        assert content is not None, f"{distribution} was imported"
        if isinstance(content, Exception):
            raise content
        return content

    return Plugin(Owner("acme", distribution, "1.0"), f"{distribution}.plugin", import_it, kind)


def spec_of(op: str) -> OpSpec:
    """The contract of `silu_and_mul`, for another op."""
    spec = known_contracts().contracts["silu_and_mul"]

    def oracle(x: Any) -> Any:
        return spec.oracle(x)

    oracle.__name__ = op
    return dataclasses.replace(spec, oracle=oracle)


def started(registry: OpRegistry, plugins: Any = (), settings: Settings | None = None) -> OpManager:
    """A manager that started with these plugins and settings."""
    manager = OpManager()
    manager.use_startup(Startup(plugins, settings or load_settings({})), registry)
    return manager


def managing(*impls: Impl, **policy: Any) -> OpManager:
    registry = OpRegistry()
    registry.register_many(impls)
    return OpManager(registry, SelectionPolicy(**policy))


def silu_kernel(op: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """Wrap `silu_and_mul` as a kernel of a test operator, which writes its result."""

    def kernel(out: torch.Tensor, input: torch.Tensor) -> None:
        put(out, op(input))

    return kernel


def silu_of_kernel(replaced: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """Wrap such a kernel as `silu_and_mul`."""

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        replaced(out, x)
        return out

    return silu_and_mul
