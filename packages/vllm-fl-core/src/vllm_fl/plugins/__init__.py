"""What is installed: the hooks, what plugins hand over, and how they are found, loaded and called.

Authors of plugins import from `vllm_fl`; these modules are core's own.
"""
