"""The hooks that a plugin may implement, and the marker that it implements them with.

Hooks are called while a process or an engine starts, never on a call path. Each returns values;
none changes what it is handed. Results of several plugins unite, in the order of their
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
    from .setting import SettingSpec
    from .types import (
        AttentionImpl,
        CommunicatorImpl,
        LayerImpl,
        OpImpl,
        PolicyDefaults,
    )

PROJECT = "vllm_fl"

HOOK_API = 1
"""The version of the hooks' interface. A plugin that was written for another one says so in a
module-level `HOOK_API = <number>`; one that says nothing is taken to be written for this one."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the implementation of the hook of the same name."""


@hookspec
def register_ops() -> Iterable[OpImpl]:  # type: ignore[empty-body]
    """Return the implementations that this backend brings.

    Called once per process, before the first call or before the engine's layers are built; a
    device may not exist yet, so look for it in `OpImpl.available`. All plugins' implementations
    are candidates side by side; an (op, impl id) that two bring is loaded from neither.

    Example::

        @hookimpl
        def register_ops():
            return [OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, silu, "acme")]
    """


@hookspec
def attention_backend() -> Iterable[AttentionImpl]:  # type: ignore[empty-body]
    """Return the attention backends that this backend brings, by class path.

    Called once per process, with `register_ops`. The policy orders all plugins' candidates; vLLM's
    own choice is one of them (`stock`), and a backend that vLLM was told to take beats them all.

    Example::

        @hookimpl
        def attention_backend():
            return [AttentionImpl("vendor.acme", "acme.attention.AcmeBackend",
                                  BackendImplKind.VENDOR, "acme")]
    """


@hookspec
def communicator() -> Iterable[CommunicatorImpl]:  # type: ignore[empty-body]
    """Return the communicators that this backend brings, by class path.

    Called once per process, with `register_ops`. The policy orders all plugins' candidates; vLLM's
    own communicator, or that of a plugin's device, is the last (`stock`). What is chosen is made in
    each worker for each of vLLM's groups of ranks, and must give the known results of every
    collective on all of them before anything else uses it; else the next candidate serves, on all.

    Example::

        @hookimpl
        def communicator():
            return [CommunicatorImpl("vendor.acme", "acme.communicator.AcmeCommunicator",
                                     BackendImplKind.VENDOR, "acme")]
    """


@hookspec
def layers() -> Iterable[LayerImpl]:  # type: ignore[empty-body]
    """Return the classes that this backend brings for whole layers of vLLM's, by class path.

    Called once per process, with `register_ops`. For layers that no op describes: linear layers,
    embeddings, convolutions, mixers, encoder attention. The layer's class name stands where an op's
    does, in policies too; vLLM's own class is the last candidate (`stock`). What is chosen is in
    vLLM's table of replacements only while the engine's model is being built. It is not verified.

    Example::

        @hookimpl
        def layers():
            return [LayerImpl("RowParallelLinear", "acme.linear.AcmeRowParallelLinear",
                              BackendImplKind.VENDOR, "acme",
                              supports=lambda r: r.quantization is None or "unquantised only")]
    """


@hookspec
def contracts() -> Iterable[Contract]:  # type: ignore[empty-body]
    """Return the ops that this distribution brings.

    Called once per process, with `register_ops`. The ops of vllm-fl-ops come so, too, and any other
    has all that they have: plan, verification, digest, explain and the conformance kit. Any plugin
    may bring implementations of it. An op that two bring is loaded from neither, and nobody else
    may bring one of the name of one of vllm-fl-ops.

    Example::

        @hookimpl
        def contracts():
            return [Contract(ACME_OP, binding="vllm_fl_acme.bindings.acme_op")]
    """


@hookspec
def device() -> DeviceProfile | None:
    """Return the hardware that this backend brings to vLLM, or None.

    For hardware that vLLM has no platform for. Called in every process, perhaps more than once,
    while vLLM looks for its platform and before the device exists; only where vLLM has none of its
    own, or VLLM_FL_PLATFORM names another. A plugin that has this hook must import nothing of vLLM
    at its own import. Two devices that both detect themselves are an error that names both, unless
    VLLM_FL_PLATFORM names one.

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

    Called once per process when settings are read, with the platform's lower-case name (`cuda`,
    `ascend`, `cpu`). Items of several plugins unite: blacklists add up, each file says where its
    own tokens stand in an op's order, another item that two set differently goes back to the
    default. A conflict never ends a start. A mistake in the file does, and so does `allow_vendors`,
    which would shut out third parties.

    Example::

        @hookimpl
        def policy(platform):
            return PolicyDefaults(HERE / "acme.yaml") if platform == "acme" else None
    """
    return None


@hookspec
def settings() -> Iterable[SettingSpec[Any]]:  # type: ignore[empty-body]
    """Return the settings that this backend adds to core's.

    Called once per process, with `register_ops`. A variable or key that core or another plugin has
    is an error of the plugin that comes later. The key of a setting that a file may have begins
    with its kind: `flagos_`, `reference_` or `vendor_<vendor>_`; so a file that has it is read
    where this backend is not installed, and the setting is kept there, without effect.

    Example::

        @hookimpl
        def settings():
            return [SettingSpec("acme_streams", "ACME_STREAMS", "auto", choices=("auto", "one"))]
    """


@hookspec
def rejections(
    settings: Any,
    op: str,
    impls: Sequence[OpImpl | AttentionImpl | CommunicatorImpl | LayerImpl],
    facts: Any,
    contract: OpSpec | None,
) -> Mapping[str, str] | None:
    """Return the implementations of `op` that this plugin rejects: impl id -> the reason, or None.

    Called when an op is resolved, if one of the settings that this plugin declares is set.
    `settings` maps each key to its effective setting: `settings["acme_streams"].value`, with
    its `.origin`. `impls` are all that is installed for the op. A verifier
    (`VERIFIES = True`) is also called if the engine requires batch-invariant implementations:
    `facts` then describe the engine, and `contract` is the contract of the op. Otherwise both are
    None. List only the arguments that you use, without defaults. An exception ends the call or the
    startup: an implementation that the user has ruled out must not run.

    Example::

        @hookimpl
        def rejections(settings, op, impls):
            if settings["acme_streams"].value == "one":
                return {"vendor.acme": "ACME_STREAMS=one"}
    """
    return None


@hookspec
def doctor(settings: Any) -> Iterable[Finding]:  # type: ignore[empty-body]
    """Return what `vllm-fl doctor` should report of this backend, its settings and its libraries.

    Called by that command only. `settings` is as for `rejections`; those that the user set
    are `settings.chosen`, and `setting.named` is one as the user wrote it.

    Example::

        @hookimpl
        def doctor(settings):
            if not os.path.exists("/opt/acme"):
                yield Finding("acme", "Acme's library is not installed.", "Its kernels are there.",
                              "pip install acme-kernels")
    """


@hookspec
def worker_start(context: WorkerContext) -> WorkerReport | None:
    """Set up this backend in a worker, and say what was done; or return None.

    Called once per worker process and engine, after the device exists and before the plan is
    verified and the weights load. All plugins' reports enter the plan's digest and the log.
    An exception ends the start: a half-made set-up must not serve.

    Example::

        @hookimpl
        def worker_start(context):
            acme.warm_up(context.device)
            return WorkerReport(("acme: streams warmed up",), {"acme": acme.__version__})
    """
    return None


@hookspec
def inspect_plan(engine: Engine, moment: Moment) -> Mapping[Key, Objection] | None:
    """Return which planned implementations must not serve on this rank, and why; or None.

    Called on all ranks at each `Moment` of the startup, and again while a rank has a new objection.
    Core merges the objections of all ranks, disables these implementations on all ranks, and plans
    again. Verifiers are called last, and only if there was no objection.
    An exception ends the startup on all ranks.

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

    Entered on every rank after the first plan is sealed, and left when the engine ends or its
    startup fails, before vLLM's code is restored. `engine.plan` may change in between.
    `engine.on_serving(f)` calls `f` just before requests are taken. An exception at entry ends the
    startup.

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
    """Return top-level keys of the worker's report with their JSON-able values, or None.

    Called for every report of this rank, from any thread, at any time after the plan is sealed. It
    must not use the device. A key that the report already has is an error.

    Example::

        @hookimpl
        def worker_report(engine):
            return {"acme_streams": acme.streams_in_use()}
    """
    return None


@hookspec
def communicator_checks(engine: Engine, communicator: Any, group: GroupFacts) -> Iterable[Check]:  # type: ignore[empty-body]
    """Return the checks that a new communicator must pass before it serves its group of ranks.

    Called on all ranks of the group, which must return the same checks in the same order. Core runs
    each on all ranks at the same time, and limits it to 120 seconds. If one fails on a rank, the
    group gets the next candidate on all ranks.

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
    """Prepare a process before it makes a configuration or an engine. Only for extensions.

    Called once in every process that vLLM's plugins are loaded in, the API server included, which
    has no engine. A `SettingsError` ends the startup; any other exception is logged.

    Example::

        @hookimpl
        def process_start():
            if os.environ.get("ACME_METRICS"):
                prometheus_client.REGISTRY.register(AcmeCollector())
    """
