"""The errors of vllm-fl: one family, each with its facts as fields.

A message says who, what, why and what to do, in that order; a program reads the fields instead.
The code of an error stands at the end of its message's first line, and `vllm-fl explain FL102`
prints the page of one. People search for codes, so that no class ever gets another one: FL1xx
settings and files, FL2xx plugins and loading, FL3xx policy and plan, FL4xx kernels and calls, FL5xx
engines and ranks, FL6xx measuring and tables, FL7xx the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class VllmFLError(RuntimeError):
    """Base of every error that vllm-fl raises on purpose.

    Attributes:
        code: what its page is found by (`FL102`): `vllm-fl explain FL102`.
        message: the text without the code.
        op: the operator's name, or None.
        impl: the implementation's id, or None.
        plugin: the entry point's name, or None.
        distribution: the installed distribution at fault ("name version"), or None.
        cause: the exception underneath, or None.
    """

    code: str = "FL000"
    op: str | None = None
    impl: str | None = None
    plugin: str | None = None
    distribution: str | None = None
    cause: BaseException | None = None

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        vars(self).update(fields)  # `code` too, of an error of another process
        if self.cause is not None:
            self.__cause__ = self.cause
        self.add_note(self.more)

    def __str__(self) -> str:
        first, line_break, rest = self.message.partition("\n")
        return f"{first} [{self.code}]{line_break}{rest}"

    @property
    def more(self) -> str:
        """Where the page of the code is; tracebacks have it beneath the message."""
        return f"`vllm-fl explain {self.code}` says what it means, and what to do."


class PluginError(VllmFLError):
    """A plugin could not be loaded, or what it registered was refused."""

    code = "FL201"


class DuplicateError(PluginError, ValueError):
    """The op already has an implementation of this id. A ValueError as well, as it used to be."""

    code = "FL202"


class DeviceError(PluginError):
    """A plugin's device cannot be used: two claim the machine, or the one asked for is absent."""

    code = "FL203"


class OwnerError(PluginError):
    """Another installed distribution owns what is ours, or brings a platform for vLLM as well."""

    code = "FL204"


class SettingsError(VllmFLError):
    """A setting is wrong; nothing of the source that holds it was applied.

    Attributes:
        key: the setting (`prefer`, `VLLM_FL_PREFER`, `op_backends.rms_norm`).
        origin: where it stands (`/etc/fl.yaml:7`, `environment`).
    """

    code = "FL101"

    key: str
    origin: str


class InvalidSettingError(SettingsError, ValueError):
    """A setting's text or value is wrong.

    A ValueError as well: vllm-plugin-FL let YAML's and Python's own errors through.
    """

    code = "FL102"


class MissingFileError(SettingsError, FileNotFoundError):
    """A file that a setting names is not there."""

    code = "FL103"


class IdleSwitchError(SettingsError):
    """A switch that is set for safety would have no effect beside a settings file."""

    code = "FL104"


class UnknownOpError(VllmFLError):
    """No contract and no plugin names this op."""

    code = "FL301"


class NoImplementationError(VllmFLError):
    """The op is known, but no candidate may run: each was rejected, or none is installed.

    Attributes:
        rejected: (impl id, reason) of every candidate that was looked at.
    """

    code = "FL302"

    rejected: tuple[tuple[str, str], ...] = ()


class NoKernelError(VllmFLError, NotImplementedError):
    """An operator of vLLM's was called that this vLLM was built without.

    Attributes:
        operator: the operator (`_C::silu_and_mul`).
    """

    code = "FL403"

    operator: str


class AllFailedError(VllmFLError):
    """Every candidate of an op was tried for one call, and each failed or refused.

    Attributes:
        causes: (impl id, exception or reason) in the order in which they were tried.
    """

    code = "FL401"

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

    code = "FL402"

    def __init__(
        self, op: str, argument: str, problem: str, *, cause: BaseException | None = None
    ) -> None:
        super().__init__(f"{op}: argument {argument!r} {problem}", op=op, cause=cause)
        self.argument = argument
        self.problem = problem


class PolicySealedError(VllmFLError):
    """The plan is sealed: layers are bound, and a change of policy could no longer reach them."""

    code = "FL303"


class StartError(VllmFLError):
    """An engine does not start: a rank cannot go on, or the plan cannot serve there.

    Attributes:
        failures: `rank 1: why` of each rank that cannot go on, if all ranks know it.
    """

    code = "FL501"

    failures: tuple[str, ...] = ()


class TargetError(PluginError):
    """A target in vLLM belongs to another op, or another plugin has replaced it."""

    code = "FL502"


class ServingError(VllmFLError):
    """What serves was found wrong after the start, as after an update of the model's weights.

    Attributes:
        wrong: (op, impl id) -> why, of all that was found wrong; `op` and `impl` are the first's.
    """

    code = "FL504"

    def __init__(self, message: str, *, wrong: Mapping[tuple[str, str], str]) -> None:
        op, impl = next(iter(wrong), (None, None))
        super().__init__(message, op=op, impl=impl)
        self.wrong = dict(wrong)
