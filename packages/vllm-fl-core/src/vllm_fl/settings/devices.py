"""Orders for some devices: from backends, the user, or a tuning table (`Settings.with_devices`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from .policy import Mode, OpOrder, Rows, Selector, joined


@dataclass(frozen=True)
class DeviceOrder:
    """One op's order on some devices.

    Args:
        order: the selectors by mode and size. Only these are tried if the user wrote the order.
            Otherwise the op's order for any device follows.
        origin: its source, like the origin of a setting.
        name: a pattern of device names, such as `NVIDIA H100*`.
        measured: the measurement as text; may be empty in a user's order.
        of_table: whether the order is from the tuning table (setting `table`).
    """

    order: OpOrder
    origin: str
    name: str
    measured: str = ""
    of_table: bool = False

    @property
    def why(self) -> str:
        return ", ".join(filter(None, (self.origin, self.measured)))

    def holds(self, device: str) -> bool:
        return fnmatchcase(device, self.name)

    def over(self, base: tuple[Selector, ...], mode: Mode) -> Rows[tuple[Selector, ...]]:
        """Return the rows of one mode. Unless the order is pinned, `base`, the op's order for any
        device, is appended to each row."""
        rows = self.order.rows(mode)
        if self.order.pinned:
            return rows
        return joined(tuple((n, tuple(dict.fromkeys((*own, *base)))) for n, own in rows))

    def __str__(self) -> str:
        return f"on {self.name}: {self.order} ({self.why})"


@dataclass(frozen=True)
class Table:
    """The tuning table (setting `table`), with the conditions for its orders. `vllm` is the release
    of vLLM, and `device` the name of the device; empty for any. `unused` is why its orders have no
    effect in an engine, or empty."""

    file: str
    vllm: str = ""
    device: str = ""
    distributions: Mapping[str, str] = field(default_factory=dict, hash=False)
    unused: str = ""

    @property
    def reason(self) -> str:
        return f"The tuning table {self.file} has no effect: {self.unused}" if self.unused else ""

    def differs(self, device: str, version: Callable[[str], str | None]) -> str:
        """Return the first condition that is not met, or empty. `version` returns the version of a
        distribution, or None; `vllm` is valid for any build of vLLM."""
        held = {"vllm": self.vllm} if self.vllm else {}
        for name, then in {**held, **self.distributions}.items():
            if (now := version(name)) != then:
                return f"{name} is {now or 'not installed'}, but the measurement used {then}"
        if self.device not in ("", device):
            return f"the device is {device or 'unknown'}, but the measurement used {self.device}"
        return ""
