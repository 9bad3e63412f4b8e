"""The contracts: one module per op, named after it, with its `SPEC`."""
