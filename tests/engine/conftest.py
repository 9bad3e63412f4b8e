"""The fixtures of the engine's tests."""

from engines import both, engine, model, plugin, runs

__all__ = ["both", "engine", "model", "plugin", "runs"]
