-- Reading and writing an agent's event store.

-- name: owner
-- Whose store this is; no row in a new one.
SELECT agent, tenant, workspace FROM state;

-- name: claim
-- Make a new store this agent's.
INSERT INTO state VALUES (1, ?, ?, ?, 0, zeroblob(32), 0);

-- name: head
-- Where the store stands.
SELECT position, state_hash, logical_clock FROM state;

-- name: read
-- The events after a position, oldest first.
SELECT position, CAST(record AS BLOB), state_hash FROM event WHERE position > ? ORDER BY position LIMIT ?;

-- name: find
-- Which of these messages, [idempotency_key, workspace, tenant] each, the store holds: the index in the list, the
-- position, what became of it.
SELECT wanted.key, event.position, event.role
FROM json_each(?) AS wanted
JOIN event ON event.idempotency_key = wanted.value ->> 0 AND event.workspace = wanted.value ->> 1
          AND event.tenant = wanted.value ->> 2 AND event.cause IS NULL;

-- name: versions
-- How often each of these entities was changed; none that never was.
SELECT entity.id, entity.version FROM json_each(?) AS wanted JOIN entity ON entity.id = wanted.value;

-- name: unpublished_of
-- What the messages at these positions caused that is not marked published.
SELECT event.position, CAST(event.record AS BLOB)
FROM json_each(?) AS wanted
JOIN event ON event.cause = wanted.value AND event.cause IS NOT NULL AND event.published_at IS NULL
ORDER BY event.position;

-- name: unpublished
-- Everything that is not marked published, oldest first.
SELECT position, CAST(record AS BLOB) FROM event WHERE cause IS NOT NULL AND published_at IS NULL ORDER BY position;

-- name: append
-- One more event.
INSERT INTO event (position, record, state_hash) VALUES (?, ?, ?);

-- name: advance
-- The state stands at a new position.
UPDATE state SET position = ?, state_hash = ?, logical_clock = ?;

-- name: count_change
-- The version of an entity that was changed.
INSERT INTO entity VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET version = excluded.version;

-- name: mark_published
-- JetStream has acknowledged these messages; those that were marked before keep their time.
UPDATE event SET published_at = ?
WHERE position IN (SELECT value FROM json_each(?)) AND published_at IS NULL;

-- name: attempts
-- The failed attempts at these messages: how many of each, and why the last one failed.
SELECT attempt.message_id, attempt.attempts, attempt.last_error
FROM json_each(?) AS wanted JOIN attempt ON attempt.message_id = wanted.value;

-- name: count_attempt
-- An attempt failed; the same one, noted again, changes nothing.
INSERT INTO attempt VALUES (?, ?, ?, ?)
ON CONFLICT (message_id) DO UPDATE
SET attempts = excluded.attempts, last_error = excluded.last_error, failed_at = excluded.failed_at
WHERE excluded.attempts > attempt.attempts;

-- name: forget_attempts
-- These messages were handled.
DELETE FROM attempt WHERE message_id IN (SELECT value FROM json_each(?));

-- name: forget_old_attempts
-- Nothing failed since then: the message is long gone from its stream.
DELETE FROM attempt WHERE failed_at < ?;
