"""A vendor of vllm-plugin-FL by its form alone; its device is the CPU."""
