"""Fixtures of the command line's tests."""

from commands import clean, distribution, fl, plugin, progress_printed

__all__ = ["clean", "distribution", "fl", "plugin", "progress_printed"]
