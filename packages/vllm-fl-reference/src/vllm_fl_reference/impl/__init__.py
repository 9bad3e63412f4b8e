"""The operators, each with its contract's parameters."""
