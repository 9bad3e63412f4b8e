"""The base class of plugins of the older form. New plugins do not need it."""

from __future__ import annotations

__all__ = ["Backend"]


class Backend:
    """A backend's name, vendor and availability, for plugins with `register_builtins(registry)`. If
    the function of an `OpImpl` is a method of an instance, the instance provides its
    availability."""

    @property
    def name(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} must define its name")

    @property
    def vendor(self) -> str | None:
        return None

    def is_available(self) -> bool:
        return True
