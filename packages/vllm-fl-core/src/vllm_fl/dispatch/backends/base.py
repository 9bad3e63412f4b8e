"""The base class that plugins of the older form subclass. New plugins need none."""

from __future__ import annotations

__all__ = ["Backend"]


class Backend:
    """A backend's name, vendor and availability, for `register_builtins(registry)` plugins.

    An `OpImpl` whose function is a method of an instance takes its availability from here.
    """

    @property
    def name(self) -> str:
        """The backend's name."""
        raise NotImplementedError(f"{type(self).__name__} must say its name")

    @property
    def vendor(self) -> str | None:
        """The vendor's name; None for a backend of no vendor."""
        return None

    def is_available(self) -> bool:
        """Whether it can run on this machine."""
        return True
