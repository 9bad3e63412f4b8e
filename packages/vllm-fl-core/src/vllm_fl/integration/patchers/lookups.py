"""Helpers to replace code of vLLM: subclasses over its classes by import path, and the locations in
which its functions are looked up."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from ...logs import get_logger
from ...text import quote

log = get_logger("engine")


def import_object(path: str) -> Any:
    """Import the object at `module.name`. Errors of the import are raised unchanged."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def path_over(module: str, prefix: str, path: str) -> str:
    """Return the path of a subclass of the class at `path`. `over_class` makes it when vLLM imports
    the path."""
    return f"{module}.{prefix}{path.replace('.', ':')}"


def over_class(module: str, prefix: str, name: str, mixin: type) -> type:
    """Make the class for a name from `path_over`: a subclass of `mixin` and of the base class in
    the name. If the base class lacks a method of `mixin` or cannot have a subclass, log an error
    and return the base class. Raises AttributeError if the name does not start with `prefix`."""
    if not name.startswith(prefix):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    base: type = import_object(name.removeprefix(prefix).replace(":", "."))
    ours = [each for each in vars(mixin) if not each.startswith(("_", "vllm_fl_"))]
    try:
        if lacks := [each for each in ours if not hasattr(base, each)]:
            raise TypeError(f"it has no {', '.join(lacks)}")
        return laid_over(module, name, mixin, base)
    except Exception as error:  # its metaclass is third-party code
        log_refusal(base, error)
        return base


def log_refusal(base: type, error: Exception, level: int = logging.ERROR) -> None:
    text = "vllm-fl is disabled, vLLM runs unmodified: cannot wrap %s.%s: %s [FL513]"
    log.log(level, text, base.__module__, base.__qualname__, quote(error))


def laid_over(module: str, name: str, mixin: type, base: type, **attributes: Any) -> type:
    """Make a subclass of `mixin` and `base` with these attributes, and set it in the module."""
    fields = {"__module__": module, "__qualname__": name, **attributes}
    made = type(f"{base.__name__}FL", (mixin, base), fields)
    setattr(sys.modules[module], name, made)
    return made


def take_off() -> None:
    """Remove the overlay from the class of `current_platform`."""
    from vllm.platforms import current_platform

    if hasattr(type(current_platform), "vllm_fl_platform"):
        object.__setattr__(current_platform, "__class__", type(current_platform).__bases__[-1])


@dataclass(frozen=True)
class Lookup:
    """A function's location: an attribute of a module or class. `held` is its original value,
    possibly a `staticmethod` object."""

    owner: Any
    attribute: str
    held: Any

    @property
    def function(self) -> Any:
        """The original function, without `staticmethod`."""
        return self.held.__func__ if isinstance(self.held, staticmethod) else self.held

    @property
    def current(self) -> Any:
        found = inspect.getattr_static(self.owner, self.attribute, None)
        return found.__func__ if isinstance(found, staticmethod) else found

    def put(self, function: Callable[..., Any]) -> None:
        as_held = staticmethod(function) if isinstance(self.held, staticmethod) else function
        setattr(self.owner, self.attribute, as_held)

    def restore(self) -> None:
        setattr(self.owner, self.attribute, self.held)


def lookup_of(path: str) -> Lookup:
    """Return the lookup of `path`. An exception of any type is raised if this vLLM lacks it or
    cannot import it."""
    above, _, attribute = path.rpartition(".")
    owner: Any = resolve_name(above)
    if isinstance(owner, type) and attribute not in vars(owner):
        raise AttributeError(f"{owner.__name__} does not define {attribute}")
    return Lookup(owner, attribute, inspect.getattr_static(owner, attribute))
