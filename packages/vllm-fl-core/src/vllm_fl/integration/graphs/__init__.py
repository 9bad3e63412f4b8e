"""Graphs that vLLM compiles: our passes over them, and the ranges of sizes that they are for."""
