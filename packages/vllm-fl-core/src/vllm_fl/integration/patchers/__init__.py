"""Patchers: each replaces one kind of target in vLLM for the plan of an engine."""
