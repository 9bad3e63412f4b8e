"""What the engines run that the verbs start: the only folder that imports vLLM."""
