"""Our passes over the graphs that vLLM compiles, and the ranges of sizes of the graphs."""
