"""The fixtures of the engine's tests."""

from engines import both, engine, model, once, plugin

__all__ = ["both", "engine", "model", "once", "plugin"]
