"""The contracts of vllm-fl's ops, and where vLLM runs each. Imports no torch and no vLLM."""
