"""Where vLLM runs each op: one module per op, with its `BINDING`."""
