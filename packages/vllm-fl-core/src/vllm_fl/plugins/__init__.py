"""Plugins: hooks, types, discovery, loading and the registry of their results.

Plugin authors import from `vllm_fl`; these modules are internal.
"""
