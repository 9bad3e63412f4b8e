"""Measuring implementations as they serve, without vLLM."""
