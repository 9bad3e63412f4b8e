"""The errors of vllm-fl.

A message has the subject, the problem, the reason and the solution, in this order. Programs read
the fields instead. The first line of a message ends with the error's code. `vllm-fl explain FL102`
prints the page of a code. Users search for codes, so never change the code of a class.

FL1xx: settings and files, FL2xx: plugins and loading, FL3xx: policy and plan, FL4xx: kernels and
calls, FL5xx: engines and ranks, FL6xx: measuring and tables, FL7xx: the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NO_FALLBACK = "Strict mode does not fall back; set VLLM_FL_STRICT=0."


class VllmFLError(RuntimeError):
    """The base class of the errors that vllm-fl raises deliberately.

    Attributes:
        code: the code of its page (`FL102`).
        message: the text without the code.
        op: the operator's name, or None.
        impl: the implementation's id, or None.
        plugin: the entry point's name, or None.
        distribution: the distribution that caused the error ("name version"), or None.
        cause: the original exception, or None.
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
        vars(self).update(fields)  # contains `code` for an error of another process
        if self.cause is not None:
            self.__cause__ = self.cause
        self.add_note(self.more)

    def __str__(self) -> str:
        first, line_break, rest = self.message.partition("\n")
        return f"{first} [{self.code}]{line_break}{rest}"

    @property
    def more(self) -> str:
        """A sentence with the command that prints the page of the code."""
        return f"Run `vllm-fl explain {self.code}` for causes and fixes."


class PluginError(VllmFLError):
    """A plugin could not be loaded, or its registrations were rejected."""

    code = "FL201"


class DuplicateError(PluginError, ValueError):
    """The op already has an implementation with this id. It is also a ValueError, for
    compatibility."""

    code = "FL202"


class DeviceError(PluginError):
    """A plugin's device cannot be used: several plugins claim the machine, or it is missing."""

    code = "FL203"


class OwnerError(PluginError):
    """Another distribution uses vllm-fl's names, or provides a second platform for vLLM."""

    code = "FL204"


class SettingsError(VllmFLError):
    """A setting is invalid. No setting of the same source was applied.

    Attributes:
        key: the setting (`prefer`, `VLLM_FL_PREFER`, `op_backends.rms_norm`).
        origin: its source (`/etc/fl.yaml:7`, `environment`).
    """

    code = "FL101"

    key: str
    origin: str


class InvalidSettingError(SettingsError, ValueError):
    """A setting's syntax or value is invalid. It is also a ValueError, because vllm-plugin-FL
    raised the errors of YAML and Python unchanged."""

    code = "FL102"


class MissingFileError(SettingsError, FileNotFoundError):
    """A file that a setting refers to is missing."""

    code = "FL103"


class IdleSwitchError(SettingsError):
    """A settings file would override a switch that is set for safety."""

    code = "FL104"


class UnknownOpError(VllmFLError):
    """No contract and no plugin has this op."""

    code = "FL301"


class NoImplementationError(VllmFLError):
    """The op is known, but no implementation can run: all were rejected, or none is installed.

    Attributes:
        rejected: (impl id, reason) of all candidates.
    """

    code = "FL302"

    rejected: tuple[tuple[str, str], ...] = ()


class NoKernelError(VllmFLError, NotImplementedError):
    """The installed vLLM was built without an operator that is called.

    Attributes:
        operator: the operator (`_C::silu_and_mul`).
    """

    code = "FL403"

    operator: str


class AllFailedError(VllmFLError):
    """All candidates of an op failed for one call, or did not support it.

    Attributes:
        causes: (impl id, exception or reason), in the order of the candidates.
    """

    code = "FL401"

    def __init__(
        self, message: str, *, op: str, causes: Sequence[tuple[str, BaseException | str]]
    ) -> None:
        last = next((c for _, c in reversed(causes) if isinstance(c, BaseException)), None)
        super().__init__(message, op=op, cause=last)
        self.causes = tuple(causes)


class CallError(VllmFLError):
    """The caller broke the op's contract. The implementation is not at fault.

    Attributes:
        argument: the invalid parameter (`x`), or `(call)` if the call cannot be read.
        problem: the problem, as a phrase that follows the argument's name.
    """

    code = "FL402"

    def __init__(
        self, op: str, argument: str, problem: str, *, cause: BaseException | None = None
    ) -> None:
        super().__init__(f"{op}: argument {argument!r} {problem}", op=op, cause=cause)
        self.argument = argument
        self.problem = problem


class PolicySealedError(VllmFLError):
    """The policy cannot change, because layers are bound to an engine's sealed plan."""

    code = "FL303"


class StartError(VllmFLError):
    """An engine fails to start, because a rank has failed or the plan cannot be used on a rank.

    Attributes:
        failures: `rank 1: reason` for each failed rank, if all ranks know them.
    """

    code = "FL501"

    failures: tuple[str, ...] = ()


class TargetError(PluginError):
    """A target in vLLM belongs to another op, or another plugin has replaced it."""

    code = "FL502"


class ServingError(VllmFLError):
    """An implementation in a serving engine is incorrect, such as after an update of the weights.

    Attributes:
        wrong: (op, impl id) -> the reason, for each incorrect implementation. `op` and `impl` refer
            to the first.
    """

    code = "FL504"

    def __init__(self, message: str, *, wrong: Mapping[tuple[str, str], str]) -> None:
        op, impl = next(iter(wrong), (None, None))
        super().__init__(message, op=op, impl=impl)
        self.wrong = dict(wrong)
