"""Vendor in the form of vllm-plugin-FL, emulated on the CPU."""
