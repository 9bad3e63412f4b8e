"""A vendor backend of vllm-fl: the kernels of vLLM's own CUDA build."""
