"""What an engine runs with, without vLLM: its plan, how the plan is verified, and its digest."""
