"""Bindings of the ops to vLLM: a module for each op or family, named after it, with its
`BINDING`."""
