"""Verification, as a plugin: whatever an engine compares at startup and while it serves."""
