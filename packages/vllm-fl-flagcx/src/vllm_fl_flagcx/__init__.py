"""FlagCX as what the ranks of a vLLM engine exchange tensors through."""
