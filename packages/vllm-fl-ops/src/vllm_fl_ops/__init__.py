"""The contracts of vllm-fl's ops, and where vLLM runs each op. Does not import torch or vLLM."""
