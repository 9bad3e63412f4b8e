"""Plugins: hooks, types, discovery, loading and the registry of their results. This package is
internal: authors of plugins import from `vllm_fl`."""
