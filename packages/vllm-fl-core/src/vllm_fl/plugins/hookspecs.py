"""The hooks that a plugin may implement, and the marker for their implementations.

Hooks are called while a process or an engine starts, never on a call path. They return values and
must not change their arguments. Results of several plugins are merged in the order of their
distributions' names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from ..contracts import OpSpec
    from ..contracts.binding import Contract
    from .device import DeviceProfile
    from .inspection import (
        Check,
        Engine,
        Finding,
        GroupFacts,
        Key,
        Moment,
        Objection,
        WorkerContext,
        WorkerReport,
    )
    from .setting import PolicyDefaults, SettingSpec
    from .types import (
        AttentionImpl,
        CommunicatorImpl,
        ExpertKernelImpl,
        LayerImpl,
        LinearKernelImpl,
        OpImpl,
    )

PROJECT = "vllm_fl"

HOOK_API = 1
"""The version of the hook interface. A plugin for a different version defines `HOOK_API` in its
module."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook with the same name."""


@hookspec
def register_ops() -> Iterable[OpImpl]:  # type: ignore[empty-body]
    """Return the implementations of this backend.

    The hook is called once per process, before the first call or before the engine's layers are
    built. A device may not exist yet: check for it in `OpImpl.available`. The implementations of
    all plugins are candidates. If two plugins have the same (op, impl id), both fail.

    Example::

        @hookimpl
        def register_ops():
            return [OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, silu, "acme")]
    """


@hookspec
def attention_backend() -> Iterable[AttentionImpl]:  # type: ignore[empty-body]
    """Return the attention backends of this backend, by class path.

    The hook is called once per process, with `register_ops`. The policy sorts the candidates of all
    plugins and vLLM's choice (`stock`). An attention backend that the user sets in vLLM overrides
    the policy.

    Example::

        @hookimpl
        def attention_backend():
            return [AttentionImpl("vendor.acme", "acme.attention.AcmeBackend",
                                  BackendImplKind.VENDOR, "acme")]
    """


@hookspec
def communicator() -> Iterable[CommunicatorImpl]:  # type: ignore[empty-body]
    """Return the communicators of this backend, by class path.

    The hook is called once per process, with `register_ops`. The policy sorts the candidates of all
    plugins. The last candidate is `stock`, the communicator of vLLM or of the device plugin. Each
    worker creates the chosen communicator for each group of ranks in vLLM. Before a communicator is
    used, its collectives must return known results on all ranks of the group. Otherwise all ranks
    of the group use the next candidate.

    Example::

        @hookimpl
        def communicator():
            return [CommunicatorImpl("vendor.acme", "acme.communicator.AcmeCommunicator",
                                     BackendImplKind.VENDOR, "acme")]
    """


@hookspec
def layers() -> Iterable[LayerImpl]:  # type: ignore[empty-body]
    """Return the classes of this backend for whole vLLM layers, by class path.

    The hook is called once per process, with `register_ops`. It is for layers without an op: linear
    layers, embeddings, convolutions, mixers, encoder attention. In settings and plans, the name of
    the layer's class is used like the name of an op. vLLM's class is the last candidate (`stock`).
    The chosen class is in vLLM's table of replacements only while the engine's model is built. The
    class is not verified.

    Example::

        @hookimpl
        def layers():
            return [LayerImpl("RowParallelLinear", "acme.linear.AcmeRowParallelLinear",
                              BackendImplKind.VENDOR, "acme",
                              supports=lambda r: r.quantization is None or "unquantised only")]
    """


@hookspec
def linear_kernels() -> Iterable[LinearKernelImpl]:  # type: ignore[empty-body]
    """Return the classes of this backend for vLLM's quantised linear layers, by class path.

    The hook is called once per process, with `register_ops`. In settings and plans, the name of the
    op is `<scheme>_linear`, such as `int8_linear`. `stock` is vLLM's choice, and its own classes
    have ids such as `vllm.CPUInt8ScaledMMLinearKernel`. The chosen classes are first in vLLM's list
    only while the engine's model is built. If a class does not support a layer, vLLM takes the next
    class. A backend that the user sets in vLLM (`--linear-backend`) overrides the policy.

    Example::

        @hookimpl
        def linear_kernels():
            return [LinearKernelImpl("int8", "acme.linear.AcmeInt8Linear",
                                     BackendImplKind.VENDOR, "acme")]
    """


@hookspec
def expert_kernels() -> Iterable[ExpertKernelImpl]:  # type: ignore[empty-body]
    """Return the classes of this backend for vLLM's quantised experts, by class path.

    The hook is called once per process, with `register_ops`. It is like `linear_kernels`: the name
    of the op is `<scheme>_experts`, such as `fp8_block_experts`, and a backend that the user sets
    in vLLM (`--moe-backend`) overrides the policy. vLLM converts the weights for the vLLM class
    that the class extends.

    Example::

        @hookimpl
        def expert_kernels():
            return [ExpertKernelImpl("fp8_block", "acme.experts.AcmeExperts",
                                     BackendImplKind.VENDOR, "acme")]
    """


@hookspec
def contracts() -> Iterable[Contract]:  # type: ignore[empty-body]
    """Return the ops of this distribution.

    The hook is called once per process, with `register_ops`. The ops have all features of the ops
    of vllm-fl-ops, which uses the same hook: plan, verification, digest, explain, conformance kit.
    Any plugin may provide implementations. If two plugins have the same op, both fail. The names of
    the ops in vllm-fl-ops are reserved: only the other plugin fails.

    Example::

        @hookimpl
        def contracts():
            return [Contract(ACME_OP, binding="vllm_fl_acme.bindings.acme_op")]
    """


@hookspec
def device() -> DeviceProfile | None:
    """Return the hardware that this backend adds to vLLM, or None.

    The hook is called if vLLM has no platform for this machine, or if VLLM_FL_PLATFORM selects a
    different platform. It is called in every process, possibly more than once, while vLLM looks for
    its platform. The device does not exist yet. Importing the plugin must not import vLLM. Two
    detected devices are an error, unless VLLM_FL_PLATFORM selects one.

    Example::

        @hookimpl
        def device():
            return DeviceProfile("acme", "acme.platform.AcmePlatform", "acme.worker.AcmeWorker",
                                 detect=lambda: os.path.exists("/dev/acme0") or "no /dev/acme0")
    """
    return None


@hookspec
def policy(platform: str) -> PolicyDefaults | None:
    """Return this backend's default settings for `platform`, or None.

    The hook is called when settings are read, possibly more than once per process, with a
    lower-case platform name (`cuda`, `ascend`, `cpu`). The settings of several plugins are merged.
    Blacklists are joined. Each file ranks its distribution's implementations in the order of an op.
    Any other setting with different values returns to its default. A conflict does not fail the
    startup. An error in the file fails the startup. `allow_vendors` does as well, because it would
    exclude third-party vendors.

    Example::

        @hookimpl
        def policy(platform):
            return PolicyDefaults(HERE / "acme.yaml") if platform == "acme" else None
    """
    return None


@hookspec
def settings() -> Iterable[SettingSpec[Any]]:  # type: ignore[empty-body]
    """Return the settings of this backend.

    The hook is called once per process, with `register_ops`. If core or another plugin already has
    the variable or key, the plugin that is loaded later fails. The key of a setting that a file may
    set begins with its kind: `flagos_`, `reference_` or `vendor_<vendor>_`. If such a file is read
    without this backend, the setting is kept without effect.

    Example::

        @hookimpl
        def settings():
            return [SettingSpec("acme_streams", "ACME_STREAMS", "auto", choices=("auto", "one"))]
    """


@hookspec
def rejections(
    settings: Any,
    op: str,
    impls: Sequence[
        OpImpl | AttentionImpl | CommunicatorImpl | LayerImpl | LinearKernelImpl | ExpertKernelImpl
    ],
    facts: Any,
    contract: OpSpec | None,
) -> Mapping[str, str] | None:
    """Return the implementations of `op` that this plugin rejects: impl id -> the reason, or None.

    The hook is called when an op is resolved, if a setting of this plugin is set. `settings` maps
    each key to its effective setting: `settings["acme_streams"].value`, with its `.origin`. `impls`
    are all installed implementations of the op. A verifier (`VERIFIES = True`) is also called if
    the engine requires batch-invariant implementations, with the `facts` of the engine and the
    `contract` of the op. Otherwise both are None. List only the arguments that you use, without
    defaults. An exception fails the call or the startup, because an implementation that the user
    has excluded must not run.

    Example::

        @hookimpl
        def rejections(settings, op, impls):
            if settings["acme_streams"].value == "one":
                return {"vendor.acme": "ACME_STREAMS=one"}
    """
    return None


@hookspec
def doctor(settings: Any) -> Iterable[Finding]:  # type: ignore[empty-body]
    """Return findings for `vllm-fl doctor` about this backend, its settings and its libraries.

    Only that command calls the hook. `settings` is as for `rejections`. `settings.chosen` are the
    settings that the user set. `setting.named` is a setting as the user wrote it.

    Example::

        @hookimpl
        def doctor(settings):
            if not os.path.exists("/opt/acme"):
                yield Finding("acme", "Acme's library is not installed.", "It has the kernels.",
                              "pip install acme-kernels")
    """


@hookspec
def worker_start(context: WorkerContext) -> WorkerReport | None:
    """Set up this backend in a worker and report it, or return None.

    The hook is called once per worker process and engine. The device exists; the plan is not
    verified yet, and the weights are not loaded. All reports are added to the log and to the digest
    of the plan. An exception fails the startup, because an engine must not run with an incomplete
    setup.

    Example::

        @hookimpl
        def worker_start(context):
            acme.warm_up(context.device)
            return WorkerReport(("acme: streams warmed up",), {"acme": acme.__version__})
    """
    return None


@hookspec
def inspect_plan(engine: Engine, moment: Moment) -> Mapping[Key, Objection] | None:
    """Return the planned implementations that must not run on this rank, and why; or None.

    The hook is called on all ranks at each `Moment` of the startup, and again while a rank has a
    new objection. Core disables these implementations on all ranks, and plans again. Verifiers are
    called last, and only if no other plugin objected. An exception fails the startup on all ranks.

    Example::

        @hookimpl
        def inspect_plan(engine, moment):
            if moment is Moment.PLANNED and engine.device.index in FAULTY:
                faulty = Objection("FL410", f"{engine.device} is known to be faulty")
                return {("silu_and_mul", "vendor.acme"): faulty}
    """
    return None


@hookspec
def engine_session(engine: Engine) -> AbstractContextManager[object] | None:
    """Return a context manager that is entered once for this engine, or None.

    It is entered on every rank after the first plan is sealed. It is left when the engine ends or
    its startup fails, before vLLM's code is restored. `engine.plan` may change in between.
    `engine.on_serving(f)` calls `f` just before the engine takes requests. An exception at entry
    fails the startup.

    Example::

        @hookimpl
        @contextmanager
        def engine_session(engine):
            engine.on_serving(acme.start_counting)
            yield
            acme.stop_counting()
    """
    return None


@hookspec
def worker_report(engine: Engine) -> Mapping[str, object] | None:
    """Return top-level keys of the worker report with their JSON-able values, or None.

    The hook is called for every report of this rank, from any thread, at any time after the plan is
    sealed. The hook must not use the device. A key that the report already has is an error.

    Example::

        @hookimpl
        def worker_report(engine):
            return {"acme_streams": acme.streams_in_use()}
    """
    return None


@hookspec
def communicator_checks(engine: Engine, communicator: Any, group: GroupFacts) -> Iterable[Check]:  # type: ignore[empty-body]
    """Return the checks that a new communicator must pass before its group of ranks uses it.

    The hook is called on all ranks of the group, which must return the same checks in the same
    order. Core runs each check on all ranks at the same time, for at most 120 seconds. If one fails
    on a rank, all ranks of the group use the next candidate.

    Example::

        @hookimpl
        def communicator_checks(engine, communicator, group):
            def run():
                ones = torch.ones(8, device=group.device, dtype=group.dtype)
                total = communicator.all_reduce(ones)
                return None if (total == group.size).all() else f"a sum is {total[0]}"

            return [Check("all_reduce of ones", run)]
    """


@hookspec
def process_start() -> None:
    """Prepare a process before it creates a configuration or an engine. Only for extensions.

    The hook is called once in every process that loads vLLM's plugins, including the API server
    (without an engine). A `SettingsError` fails the startup; other exceptions are logged.

    Example::

        @hookimpl
        def process_start():
            if os.environ.get("ACME_METRICS"):
                prometheus_client.REGISTRY.register(AcmeCollector())
    """
