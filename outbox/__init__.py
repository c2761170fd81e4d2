"""The SQLite outbox: schema, the one writer with its group commit, accept, claim, settle, requeue, prune."""
