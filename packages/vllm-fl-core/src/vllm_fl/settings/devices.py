"""Orders for some devices only: those that backends ship, a user's own, and those of a table.

An order for a device wins over the lists for all devices; see `Settings.with_devices`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from .policy import Mode, OpOrder, Rows, Token, joined


@dataclass(frozen=True)
class DeviceOrder:
    """One op's order on some devices.

    Args:
        order: the tokens by mode and size. Those of a backend's file or a table come before the
            op's order on any device; a user's are all that is tried.
        origin: its origin, like that of a setting.
        name: a pattern of the names of the devices, such as `NVIDIA H100*`.
        measured: the measurement, in words; empty if a user wrote none.
        of_table: whether it is in the file that the setting `table` names.
    """

    order: OpOrder
    origin: str
    name: str
    measured: str = ""
    of_table: bool = False

    @property
    def why(self) -> str:
        """Its origin and its measurement."""
        return ", ".join(filter(None, (self.origin, self.measured)))

    def holds(self, device: str) -> bool:
        """Return whether it is for a device of this name."""
        return fnmatchcase(device, self.name)

    def over(self, base: tuple[Token, ...], mode: Mode) -> Rows[tuple[Token, ...]]:
        """Return the rows of one mode, over the op's order on any device."""
        rows = self.order.rows(mode)
        if self.order.pinned:
            return rows
        return joined(tuple((n, tuple(dict.fromkeys((*own, *base)))) for n, own in rows))

    def __str__(self) -> str:
        return f"on {self.name}: {self.order} ({self.why})"


@dataclass(frozen=True)
class Table:
    """The file of `vllm-fl tune` that the setting `table` names, and what its orders hold for.

    Args:
        file: the file.
        vllm: the release of vLLM; empty for any.
        device: the name of the device; empty for any.
        distributions: name -> version of what was measured.
        unused: why its orders have no effect in an engine; empty if they have.
    """

    file: str
    vllm: str = ""
    device: str = ""
    distributions: Mapping[str, str] = field(default_factory=dict, hash=False)
    unused: str = ""

    @property
    def reason(self) -> str:
        """Why it has no effect, in a sentence without its full stop."""
        return f"The table {self.file} has no effect: {self.unused}" if self.unused else ""

    def differs(self, device: str, version: Callable[[str], str | None]) -> str:
        """Return the first value that differs here; empty if none does.

        Args:
            device: the name of the device.
            version: returns the version of a distribution, or None; of vLLM by `vllm`.
        """
        held = {"vllm": self.vllm} if self.vllm else {}
        for name, then in {**held, **self.distributions}.items():
            if (now := version(name)) != then:
                return f"{name} is {now or 'not installed'}, and it was measured with {then}"
        if self.device not in ("", device):
            return f"the device is {device or 'unknown'}, and it was measured on {self.device}"
        return ""
