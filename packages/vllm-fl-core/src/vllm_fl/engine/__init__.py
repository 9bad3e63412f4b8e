"""The parts of an engine that do not import vLLM: plan, digest, operators for compiled code."""
