"""The places in vLLM that we take: how each kind of place is taken, one module a kind."""
