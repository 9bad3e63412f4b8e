"""Find, load and call plugins; the hooks and types that they use; the registry of their results.

Plugin authors import from `vllm_fl`. These modules are internal.
"""
