-- What is the least that any outbox has to write.

-- name: create
-- A table with the columns of an outbox (docs/contract/send.md#send-50) and its indexes: what any of them has to write.
CREATE TABLE outbox (
    id TEXT PRIMARY KEY,
    client_message_id TEXT NOT NULL UNIQUE,
    request_fingerprint BLOB NOT NULL,
    payload BLOB NOT NULL,
    enqueued_at INTEGER NOT NULL,
    attempts INTEGER DEFAULT 0,
    next_attempt_at INTEGER NOT NULL,
    status TEXT CHECK (status IN ('pending', 'inflight', 'done', 'dead', 'aborted')),
    last_error TEXT,
    delivered_at INTEGER,
    broker_message_id TEXT,
    aborted_at INTEGER,
    aborted_by TEXT,
    superseded_by TEXT
);
CREATE INDEX outbox_pending ON outbox (status, next_attempt_at);
CREATE INDEX outbox_aborted ON outbox (status, aborted_at) WHERE status = 'aborted';

-- name: insert
-- A row, as a send would leave it.
INSERT INTO outbox (id, client_message_id, request_fingerprint, payload, enqueued_at, next_attempt_at, status)
VALUES (:id, :client_message_id, :fingerprint, :payload, :now, :now, 'pending');
