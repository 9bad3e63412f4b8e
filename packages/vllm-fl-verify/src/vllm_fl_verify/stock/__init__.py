"""Verification of stock vLLM: `vllm-fl verify --stock`.

An engine without vllm-fl's overlay and without a backend loads `worker.StockChecks` into its
workers. Importing `worker` changes vLLM in that process; no other module imports it.
"""
