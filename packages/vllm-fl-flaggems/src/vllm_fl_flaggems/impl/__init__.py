"""The operators on FlagGems's Triton kernels, one module per family."""
