"""Verification of implementations at startup and while serving: a plugin of vllm-fl."""
