"""Code for the verbs that uses vLLM's layers and functions, or runs in engines."""
