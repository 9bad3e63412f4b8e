"""The base class of plugins of the older form. New plugins do not need it."""

from __future__ import annotations

__all__ = ["Backend"]


class Backend:
    """A backend's name, vendor and availability, for `register_builtins(registry)` plugins.

    An `OpImpl` with a method of an instance as its function takes its availability from here.
    """

    @property
    def name(self) -> str:
        """The backend's name; subclasses must define it."""
        raise NotImplementedError(f"{type(self).__name__} must say its name")

    @property
    def vendor(self) -> str | None:
        """The vendor's name, or None."""
        return None

    def is_available(self) -> bool:
        """Whether the backend can run on this machine."""
        return True
