-- Messages of dead letters that were replayed, in the words of rows.sql: each is an aggregate of its own, as letters are. An
-- operator's replay publishes one itself, and notes where it is; a publisher does so again where its stream lost it.

\set table postroom.replays
\set key item.id::text
\set is item.id = wanted.key::bigint
\set identity item.message_id
\set subject item.subject
\set aggregate id
\set place id
\set lock hashint8extended(aggregate, 4)
\set owner item.context
\set since item.replayed_at
\set ours item.context = $1
\set confirmed postroom.is_confirmed(item.message_id, item.subject)
\set ended FALSE

-- name: claim
-- The first $2 of the replays $1, of $3 bytes at most (one at least); $4 is the longest wait.
WITH locked AS MATERIALIZED (
  SELECT id, message_id, subject, headers, payload, epoch, publish_attempts FROM postroom.replays
  WHERE id = ANY ($1::bigint[]) AND published_at IS NULL AND postroom.is_due(next_attempt_at, $4::interval)
  ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED
), measured AS (
  SELECT locked.*, sum(octet_length(payload)) OVER (ORDER BY id) - octet_length(payload) AS bytes_before FROM locked
)
SELECT id AS aggregate, 1 AS place, message_id, subject, headers, payload, epoch, publish_attempts
FROM measured WHERE bytes_before < $3 ORDER BY id;

-- name: keep
-- Those of the context $1 that are not there yet: ids $2, subjects $3, headers $4 and payloads $5. Returns their keys.
INSERT INTO postroom.replays (context, message_id, subject, headers, payload)
SELECT $1, * FROM unnest($2::text[], $3::text[], $4::bytea[], $5::bytea[])
ON CONFLICT (context, message_id) DO NOTHING RETURNING id::text AS key, message_id;

-- name: prune
-- Deletes up to $2 that were published before $1: the record of them ends.
DELETE FROM postroom.replays WHERE id IN (
  SELECT id FROM postroom.replays WHERE published_at < $1 LIMIT $2 FOR UPDATE SKIP LOCKED
);

-- name: drop
-- Moves those of the replays $1 out of the table that were refused and are unpublished; $2 does it, because of $3.
WITH dropped AS (
  DELETE FROM postroom.replays
  WHERE id = ANY ($1::text[]::bigint[]) AND published_at IS NULL AND publish_error IS NOT NULL
  RETURNING *
)
INSERT INTO postroom.dropped_replays (
  id, context, message_id, subject, headers, payload, replayed_at, publish_attempts, publish_error, dropped_by, reason
)
SELECT id, context, message_id, subject, headers, payload, replayed_at, publish_attempts, publish_error, $2, $3 FROM dropped
RETURNING id::text AS id;

-- name: find_dropped
-- Who dropped those of the replays $1 that were dropped, and when.
SELECT id::text, dropped_by, dropped_at FROM postroom.dropped_replays WHERE id::text = ANY ($1::text[]);

-- name: list_dropped
-- What was dropped of the context $1, or of all, the latest $2, oldest first.
SELECT * FROM (
  SELECT id::text AS id, subject, context AS aggregate, publish_error AS error, dropped_at, dropped_by, reason
  FROM postroom.dropped_replays AS item WHERE $1::text IS NULL OR :ours ORDER BY dropped_at DESC, id LIMIT $2
) AS latest ORDER BY dropped_at, id;
