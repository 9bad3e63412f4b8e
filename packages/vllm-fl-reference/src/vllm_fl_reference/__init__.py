"""The reference backend of vllm-fl: every operator in plain PyTorch."""
