"""Bindings of the ops to vLLM: one module for each op or family, with the same name and a
`BINDING`."""
