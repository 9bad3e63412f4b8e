"""The FlagGems backend of vllm-fl."""
