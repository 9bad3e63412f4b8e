"""A vendor backend for vllm-fl that uses the C++ kernels of vLLM's CPU build."""
