"""The errors of vllm-fl: one family, each with its facts as fields.

A message says who, what, why and what to do, in that order; a program reads the fields instead.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AllFailedError",
    "CallError",
    "DuplicateError",
    "InvalidSettingError",
    "MissingFileError",
    "NoImplementationError",
    "NoKernelError",
    "PluginError",
    "PolicySealedError",
    "SettingsError",
    "UnknownOpError",
    "VllmFLError",
]


class VllmFLError(RuntimeError):
    """Base of every error that vllm-fl raises on purpose.

    Attributes:
        op: the operator's name, or None.
        impl: the implementation's id, or None.
        plugin: the entry point's name, or None.
        distribution: the installed distribution at fault ("name version"), or None.
        cause: the exception underneath, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        impl: str | None = None,
        plugin: str | None = None,
        distribution: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.op = op
        self.impl = impl
        self.plugin = plugin
        self.distribution = distribution
        self.cause = cause
        if cause is not None:
            self.__cause__ = cause


class PluginError(VllmFLError):
    """A plugin could not be loaded, or what it registered was refused."""


class DuplicateError(PluginError, ValueError):
    """The op already has an implementation of this id. A ValueError as well, as it used to be."""


class SettingsError(VllmFLError):
    """A setting is wrong; nothing of the source that holds it was applied.

    Attributes:
        key: the setting (`prefer`, `VLLM_FL_PREFER`, `op_backends.rms_norm`).
        origin: where it stands (`/etc/fl.yaml:7`, `environment`).
    """

    def __init__(self, message: str, *, key: str, origin: str, op: str | None = None) -> None:
        super().__init__(message, op=op)
        self.key = key
        self.origin = origin


class InvalidSettingError(SettingsError, ValueError):
    """A setting's text or value is wrong.

    A ValueError as well: vllm-plugin-FL let YAML's and Python's own errors through.
    """


class MissingFileError(SettingsError, FileNotFoundError):
    """A file that a setting names is not there."""


class UnknownOpError(VllmFLError):
    """No contract and no plugin names this op."""


class NoImplementationError(VllmFLError):
    """The op is known, but no candidate may run: each was rejected, or none is installed.

    Attributes:
        rejected: (impl id, reason) of every candidate that was looked at.
    """

    def __init__(self, message: str, *, op: str, rejected: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message, op=op)
        self.rejected = tuple(rejected)


class NoKernelError(VllmFLError, NotImplementedError):
    """An operator of vLLM's was called that this vLLM was built without.

    Attributes:
        operator: the operator (`_C::silu_and_mul`).
    """

    def __init__(self, message: str, *, operator: str, op: str | None = None) -> None:
        super().__init__(message, op=op)
        self.operator = operator


class AllFailedError(VllmFLError):
    """Every candidate of an op was tried for one call, and each failed or refused.

    Attributes:
        causes: (impl id, exception or reason) in the order in which they were tried.
    """

    def __init__(
        self, message: str, *, op: str, causes: Sequence[tuple[str, BaseException | str]]
    ) -> None:
        last = next((c for _, c in reversed(causes) if isinstance(c, BaseException)), None)
        super().__init__(message, op=op, cause=last)
        self.causes = tuple(causes)


class CallError(VllmFLError):
    """The caller broke an op's contract. No implementation is blamed for it.

    Attributes:
        argument: the parameter that is wrong (`x`), or `(call)` when the call's shape is.
        problem: what is wrong with it.
    """

    def __init__(
        self, op: str, argument: str, problem: str, *, cause: BaseException | None = None
    ) -> None:
        super().__init__(f"{op}: argument {argument!r} {problem}", op=op, cause=cause)
        self.argument = argument
        self.problem = problem


class PolicySealedError(VllmFLError):
    """The plan is sealed: layers are bound, and a change of policy could no longer reach them."""
