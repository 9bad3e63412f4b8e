"""Files that operators read, as a plugin: metrics, the report, and the lock."""
