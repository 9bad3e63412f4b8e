"""What an engine runs with, without vLLM: its plan, compiled code, and the digest."""
