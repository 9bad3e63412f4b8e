"""The NVIDIA CUDA backend of vllm-fl."""
