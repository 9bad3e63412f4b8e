"""Verification of implementations at startup and while an engine serves, as a vllm-fl plugin."""
