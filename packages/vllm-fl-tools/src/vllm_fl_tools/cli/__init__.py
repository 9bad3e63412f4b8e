"""The verbs that this distribution brings, one module without `_` for each."""
