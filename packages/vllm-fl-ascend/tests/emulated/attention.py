"""What the operators behind attention compute."""
