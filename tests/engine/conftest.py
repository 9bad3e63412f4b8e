"""Fixtures of the engine tests."""

from engines import both, engine, model, once, plugin, shared_folder
from startups import shared, startup

__all__ = ["both", "engine", "model", "once", "plugin", "shared", "shared_folder", "startup"]
