"""Measures implementations without vLLM, called as an engine calls them."""
