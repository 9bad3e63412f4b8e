"""Passes of vllm-fl over the graphs that vLLM compiles, and the ranges of sizes of the graphs."""
