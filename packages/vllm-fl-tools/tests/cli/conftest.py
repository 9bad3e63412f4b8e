"""Fixtures of the command line's tests."""

from commands import clean, distribution, fl, plugin, told

__all__ = ["clean", "distribution", "fl", "plugin", "told"]
