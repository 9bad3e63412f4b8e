"""Measures implementations without vLLM, with the calls of an engine."""
