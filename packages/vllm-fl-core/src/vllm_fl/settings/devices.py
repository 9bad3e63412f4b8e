"""Orders that a settings file has for some devices alone, and the device that they may hold for.

A backend ships what it has measured on a class of devices, with the figure. What a file says of a
device's class lies above its lists for all devices; see `Settings.with_devices`.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .policy import Mode, OpOrder, Rows, Token, joined


@dataclass(frozen=True)
class Device:
    """The class of the device that an engine runs on.

    Args:
        name: as its driver has it: `NVIDIA H100 80GB HBM3`.
        capability: its compute capability, as `9.0`; empty where it has none.
    """

    name: str
    capability: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.capability or 'no compute capability'})"


@dataclass(frozen=True)
class Measured:
    """The figure for which an order was written.

    Args:
        date: the day.
        device: the name of the device.
        ratio: of what it says; above 1 the order is the faster one.
        what: what was measured.
    """

    date: datetime.date
    device: str
    ratio: float
    what: str

    def __str__(self) -> str:
        return f"measured {self.date} on {self.device}: {self.ratio:g} times as fast in {self.what}"


@dataclass(frozen=True)
class DeviceOrder:
    """One op's order on the devices of one section.

    Args:
        order: the tokens by mode and size. Those of a file that a backend ships come before the
            op's order on any device; a user's are all that is tried, as in a list of theirs.
        origin: where it stands, as a setting's.
        capability: the compute capability of the devices, or empty for any.
        name: a pattern of their names, as `NVIDIA H100*`; or empty for any.
        measured: the figure; None where a user wrote none.
    """

    order: OpOrder
    origin: str
    capability: str = ""
    name: str = ""
    measured: Measured | None = None

    @property
    def devices(self) -> str:
        """The devices that it is for, in words."""
        told = {"compute capability": self.capability, "name": self.name}
        return " and ".join(f"{what} {value}" for what, value in told.items() if value)

    @property
    def why(self) -> str:
        """Where it stands, and the figure."""
        return ", ".join(map(str, filter(None, (self.origin, self.measured))))

    def holds(self, device: Device) -> bool:
        """Whether it is for this device."""
        fits = self.capability in ("", device.capability)
        return fits and fnmatchcase(device.name, self.name or "*")

    def over(self, base: tuple[Token, ...], mode: Mode) -> Rows[tuple[Token, ...]]:
        """The rows of one mode, over the op's order on any device."""
        rows = self.order.rows(mode)
        if self.order.pinned:
            return rows
        return joined(tuple((n, tuple(dict.fromkeys((*own, *base)))) for n, own in rows))

    def __str__(self) -> str:
        return f"on devices of {self.devices}: {self.order} ({self.why})"


def capability_of(text: str) -> str:
    """A compute capability, as `9.0`. Raises ValueError."""
    if not re.fullmatch(r"[1-9][0-9]?\.[0-9]", text):
        raise ValueError(f"expected a compute capability such as 9.0, got {text!r}")
    return text
