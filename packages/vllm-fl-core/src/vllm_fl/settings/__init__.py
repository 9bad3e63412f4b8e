"""Settings: their declarations, sources and values, and the policy that they define."""
