"""Where Python code of vLLM's looks a function up, so that another one can stand there."""

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


def named(path: str) -> Any:
    """What a path of the form `module.name` names; whatever importing the module raises."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def path_over(module: str, prefix: str, path: str) -> str:
    """Where the class over the one at `path` is looked up: only a path travels to vLLM."""
    return f"{module}.{prefix}{path.replace('.', ':')}"


def over_class(module: str, prefix: str, name: str, mixin: type) -> type:
    """The class of this name in a module, made on demand over the one whose path the name holds.

    Returns:
        The class below itself, where it lacks what ours calls or takes nothing before it: that is
        said.

    Raises:
        AttributeError: the name does not begin so.
    """
    if not name.startswith(prefix):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    base: type = named(name.removeprefix(prefix).replace(":", "."))
    ours = [each for each in vars(mixin) if not each.startswith(("_", "vllm_fl_"))]
    try:
        if lacks := [each for each in ours if not hasattr(base, each)]:
            raise TypeError(f"it has no {', '.join(lacks)}")
        return laid_over(module, name, mixin, base)
    except Exception as error:  # its metaclass is anybody's code
        log_refusal(base, error)
        return base


def log_refusal(base: type, error: Exception, level: int = logging.ERROR) -> None:
    """Log that a class takes no overlay."""
    text = "vllm-fl steps aside, vLLM runs as stock: %s.%s takes no overlay: %s [FL513]"
    log.log(level, text, base.__module__, base.__qualname__, quote(error))


def laid_over(module: str, name: str, mixin: type, base: type, **own: Any) -> type:
    """A class of `mixin` and `base`, which the module has from now on; with what is its own."""
    fields = {"__module__": module, "__qualname__": name, **own}
    made = type(f"{base.__name__}FL", (mixin, base), fields)
    setattr(sys.modules[module], name, made)
    return made


def take_off() -> None:
    """Give vLLM's platform of this process its own class back, where an overlay lies over it."""
    from vllm.platforms import current_platform

    if hasattr(type(current_platform), "vllm_fl_platform"):
        object.__setattr__(current_platform, "__class__", type(current_platform).__bases__[-1])


@dataclass(frozen=True)
class Lookup:
    """Where a function is looked up, and what was found there.

    Args:
        owner: a module or a class.
        attribute: its name there.
        held: what is there, a staticmethod as such.
    """

    owner: Any
    attribute: str
    held: Any

    @property
    def function(self) -> Any:
        """The function itself."""
        return self.held.__func__ if isinstance(self.held, staticmethod) else self.held

    @property
    def now(self) -> Any:
        """The function that stands there at present; None where there is nothing any more."""
        found = inspect.getattr_static(self.owner, self.attribute, None)
        return found.__func__ if isinstance(found, staticmethod) else found

    def put(self, function: Callable[..., Any]) -> None:
        """Put `function` there, as what was there."""
        as_held = staticmethod(function) if isinstance(self.held, staticmethod) else function
        setattr(self.owner, self.attribute, as_held)

    def restore(self) -> None:
        """Put back what was there."""
        setattr(self.owner, self.attribute, self.held)


def lookup_of(path: str) -> Lookup:
    """Return where `path` is looked up.

    Raises:
        Exception: this vLLM has no such thing, or importing it fails.
    """
    above, _, attribute = path.rpartition(".")
    owner: Any = resolve_name(above)
    if isinstance(owner, type) and attribute not in vars(owner):
        raise AttributeError(f"{owner.__name__} has no {attribute} of its own")
    return Lookup(owner, attribute, inspect.getattr_static(owner, attribute))
