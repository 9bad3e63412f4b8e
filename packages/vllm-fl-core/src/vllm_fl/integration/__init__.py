"""vllm-fl inside vLLM: the only folder that imports vllm."""
