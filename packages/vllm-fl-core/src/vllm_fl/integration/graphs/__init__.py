"""Passes of vllm-fl on the graphs that vLLM compiles, and the ranges of sizes of the graphs."""
