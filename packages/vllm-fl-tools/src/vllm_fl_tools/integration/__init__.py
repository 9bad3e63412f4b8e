"""Code for the verbs that depends on vLLM's layers and functions, or runs in their engines."""
