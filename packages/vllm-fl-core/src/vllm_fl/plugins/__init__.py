"""Plugins: hooks, types, discovery, loading and the registry of their results. Internal: authors
import from `vllm_fl`."""
