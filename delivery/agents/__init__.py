"""The agent runtime: one consumer handler, one SQLite event store, and the chain of hashes over it."""
