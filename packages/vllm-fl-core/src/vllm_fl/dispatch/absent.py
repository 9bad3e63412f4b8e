"""What is asked for and is not there: the errors that say why, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import NoImplementationError, PluginError, UnknownOpError
from ..plugins.plugin import Plugin
from ..plugins.reserved import OPS, RESERVED_OPS, why_absent
from ..plugins.snapshot import RegistrySnapshot
from ..plugins.types import Impl, OpImpl
from ..settings.unmatched import meant
from ..text import closest
from .resolver import Trace


def check_named(trace: Trace, impls: Sequence[Impl], plugins: Iterable[Plugin]) -> None:
    """A name that was asked for and whose plugin failed is an error, never passed over.

    Raises:
        PluginError: the order names what a plugin would have brought that failed.
    """
    for token in trace.order:
        if token.name is None or any(token.matches(impl) for impl in impls):
            continue
        for plugin in plugins:
            if plugin.error is not None and plugin.may_bring(token.name, trace.op):
                raise _failed(
                    f"The settings ask for '{token}' for op '{trace.op}', but the plugin that "
                    "would bring it failed.",
                    plugin.error,
                    trace.op,
                    token.name,
                )


def check_contract(op: str, snapshot: RegistrySnapshot, plugins: Sequence[Plugin]) -> None:
    """An implementation whose contract got lost would run unverified, or not at all.

    Raises:
        PluginError: `op` has one without a contract, and the plugin failed, or is not there, that
            brings it.
    """
    impls = snapshot.impls_by_op.get(op, ())
    first = next((impl for impl in impls if isinstance(impl, OpImpl)), None)
    if first is None or op in snapshot.contracts:
        return
    owner = snapshot.owners.get((op, first.impl_id))
    whose = f" of {owner.name}" if owner is not None else ""
    lost = f"Op '{op}' has no contract, by which '{first.impl_id}'{whose} would be verified"
    for plugin in plugins:
        if plugin.error is not None and plugin.lost_contracts:
            told = f"{lost}, and a plugin failed that may have brought it."
            raise _failed(told, plugin.error, op, first.impl_id)
    if op in RESERVED_OPS:
        raise PluginError(
            f"{lost}: {why_absent(plugins)}.", op=op, impl=first.impl_id, distribution=OPS
        )


def _failed(told: str, error: PluginError, op: str, impl: str) -> PluginError:
    """The error of what a plugin would have brought that failed with `error`."""
    return PluginError(
        f"{told} {error.message}",
        op=op,
        impl=impl,
        plugin=error.plugin,
        distribution=error.distribution,
        cause=error,
    )


def unknown(op: str, snapshot: RegistrySnapshot, plugins: Sequence[Plugin]) -> UnknownOpError:
    """The error of an op that neither a contract nor a plugin names."""
    known = snapshot.ops
    left_out = [plugin.owner.label for plugin in plugins if plugin.status == "disabled"]
    if op in RESERVED_OPS:
        more = f" Its contract is missing here: {why_absent(plugins)}."
    else:
        more = f" VLLM_FL_PLUGINS leaves out {', '.join(left_out)}." if left_out else ""
    return UnknownOpError(
        f"No contract and no installed plugin names the op '{op}'.{closest(op, known)} "
        f"Known: {', '.join(known) or 'none'}.{more}",
        op=op,
    )


def nothing_for(
    trace: Trace, snapshot: RegistrySnapshot, plugins: Iterable[Plugin]
) -> NoImplementationError:
    """The error of an op of which nothing may run."""
    rejected = trace.rejected
    if rejected:
        why = "every candidate was rejected: " + "; ".join(f"{i}: {r}" for i, r in rejected)
        impls = snapshot.impls_by_op.get(trace.op, ())
        for token in trace.order:
            if token.name and not any(token.matches(impl) for impl in impls):
                why += f". {str(token)!r} matches nothing installed.{meant(token, impls)}"
                why = why.removesuffix(".")
        todo = f"`vllm-fl explain {trace.op} --script` shows where each setting comes from."
    else:
        brought = sorted({owner.label for owner in snapshot.owners.values()})
        why = f"no installed plugin has one (installed: {', '.join(brought) or 'none'})"
        todo = (
            "Install a backend: pip install vllm-fl-reference (plain PyTorch), or your "
            "hardware vendor's."
        )
    if names := ", ".join(plugin.owner.label for plugin in plugins if plugin.error is not None):
        todo += f" These plugins failed to load, or not whole: {names}; see `vllm-fl plugins`."
    return NoImplementationError(
        f"Op '{trace.op}' has no implementation that may run: {why}. {todo}",
        op=trace.op,
        rejected=rejected,
    )
