"""The console: pages on which operators see what the broker knows, and repair what it permits."""
