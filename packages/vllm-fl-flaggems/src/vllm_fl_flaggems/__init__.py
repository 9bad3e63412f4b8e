"""The FlagGems backend of vllm-fl: FlagGems's Triton kernels."""
