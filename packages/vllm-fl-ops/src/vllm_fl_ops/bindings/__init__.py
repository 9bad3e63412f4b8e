"""Where vLLM runs each op: one module per op, named after it, with its `BINDING`."""
