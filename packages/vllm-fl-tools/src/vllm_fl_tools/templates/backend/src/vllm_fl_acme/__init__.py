"""Acme's backend of vllm-fl."""
