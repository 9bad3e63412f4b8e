"""The FlagCX backend of vllm-fl: communication between the ranks of a vLLM engine."""
