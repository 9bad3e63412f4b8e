"""Plugin for operators: metrics, worker reports, and the comparison with a lock file."""
