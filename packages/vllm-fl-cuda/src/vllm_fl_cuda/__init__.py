"""The CUDA backend of vllm-fl, on the kernels in vLLM's CUDA build."""
