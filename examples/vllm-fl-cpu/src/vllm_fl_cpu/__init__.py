"""A vendor backend of vllm-fl: the C++ kernels of vLLM's own CPU build."""
