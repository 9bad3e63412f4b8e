"""Verification of vLLM's implementations, without a plan."""
