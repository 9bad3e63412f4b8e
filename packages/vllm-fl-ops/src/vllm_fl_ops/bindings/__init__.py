"""Bindings of the ops to vLLM: a module named after each op or family, with its `BINDING`."""
