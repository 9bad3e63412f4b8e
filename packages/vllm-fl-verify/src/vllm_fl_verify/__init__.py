"""Verification of implementations at startup and while serving, as a vllm-fl plugin."""
