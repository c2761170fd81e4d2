-- Events, in the words of rows.sql, and the queries that only they have.
--
-- Some consumer of the stream may still want an event that others have handled (`awaited`): it had not acknowledged it, nor
-- ended it in its inbox. One that was seen in an earlier stream of the name alone has acknowledged nothing of this one, and
-- comes back. This is no function of the database: it is asked for each of many events, and a call takes longer than it.

\set table postroom.outbox_events
\set key item.id::text
\set is item.id = wanted.key::uuid
\set identity item.id::text
\set subject item.subject
\set aggregate aggregate_id
\set place position
\set lock hashtextextended(aggregate, 1)
\set owner item.aggregate_id
\set since item.occurred_at
\set ours (starts_with(item.subject, $1 || '.') OR starts_with(item.subject, 'cmd.' || $1 || '.'))
\set floors postroom.consumer_floors AS known LEFT JOIN postroom.consumer_floors AS own ON own.stream = known.stream AND own.stream_created_at = item.stream_created_at AND own.consumer = known.consumer
\set behind known.stream = item.stream AND coalesce(own.floor, 0) < item.stream_sequence AND item.subject ~ coalesce(own.pattern, known.pattern)
\set inboxed inbox.source_context = postroom.context_of(item.subject) AND inbox.message_id = item.id::text AND inbox.consumer = known.consumer AND num_nonnulls(inbox.processed_at, inbox.dead_at) > 0
\set awaited EXISTS (SELECT FROM :floors WHERE :behind AND NOT EXISTS (SELECT FROM postroom.inbox_messages AS inbox WHERE :inboxed))
\set confirmed (postroom.is_confirmed(item.id::text, item.subject) AND NOT :awaited)
\set ended FALSE

-- name: claim
-- The oldest $2 unpublished events of the aggregates $1, of $3 bytes at most (one at least); $4 is the longest wait. `place`
-- counts within the aggregate: where a number is missing, a row is held by another publisher or not due, and nothing behind
-- it may go. Each row is looked up by itself (LATERAL): after a quiet time the planner estimates that nothing is unpublished,
-- and would join every row with every other.
WITH oldest AS MATERIALIZED (
  SELECT following.*, sum(bytes) OVER (ORDER BY position) - bytes AS bytes_before
  FROM unnest($1::text[]) AS claimed (aggregate_id), LATERAL (
    SELECT id, aggregate_id, position, pg_column_size(payload) AS bytes, row_number() OVER (ORDER BY position) AS place
    FROM postroom.outbox_events AS event
    WHERE published_at IS NULL AND event.aggregate_id = claimed.aggregate_id
    ORDER BY position LIMIT $2
  ) AS following
  ORDER BY position LIMIT $2
)
SELECT event.id::text AS id, event.aggregate_id AS aggregate, oldest.place, event.subject, event.epoch,
  event.publish_attempts, event.payload::text AS body, event.event_type, event.event_version, event.occurred_at,
  event.correlation_id, event.causation_id, event.traceparent
FROM oldest, LATERAL (
  SELECT * FROM postroom.outbox_events AS event
  WHERE event.id = oldest.id AND event.aggregate_id = oldest.aggregate_id AND event.position = oldest.position
    AND event.published_at IS NULL AND postroom.is_due(event.next_attempt_at, $4::interval)
  FOR UPDATE SKIP LOCKED
) AS event
WHERE oldest.bytes_before < $3
ORDER BY event.position;

-- name: prune
-- Deletes up to $2 events that were published before $1: the record of them ends.
DELETE FROM postroom.outbox_events WHERE id IN (
  SELECT id FROM postroom.outbox_events WHERE published_at < $1 LIMIT $2 FOR UPDATE SKIP LOCKED
);

-- name: drop
-- Moves those of the events $1 out of the outbox that were refused and are unpublished; $2 does it, because of $3.
WITH dropped AS (
  DELETE FROM postroom.outbox_events
  WHERE id = ANY ($1::text[]::uuid[]) AND published_at IS NULL AND publish_error IS NOT NULL
  RETURNING *
)
INSERT INTO postroom.dropped_events (
  id, aggregate_type, aggregate_id, event_type, event_version, subject, payload, occurred_at, correlation_id,
  causation_id, publish_attempts, publish_error, dropped_by, reason
)
SELECT id, aggregate_type, aggregate_id, event_type, event_version, subject, payload, occurred_at, correlation_id,
  causation_id, publish_attempts, publish_error, $2, $3
FROM dropped
RETURNING id::text AS id;

-- name: find_dropped
-- Who dropped those of the events $1 that were dropped, and when.
SELECT id::text, dropped_by, dropped_at FROM postroom.dropped_events WHERE id::text = ANY ($1::text[]);

-- name: list_dropped
-- What was dropped of the context $1, or of all, the latest $2, oldest first.
SELECT * FROM (
  SELECT id::text AS id, subject, aggregate_id AS aggregate, publish_error AS error, dropped_at, dropped_by, reason
  FROM postroom.dropped_events AS item WHERE $1::text IS NULL OR :ours ORDER BY dropped_at DESC, id LIMIT $2
) AS latest ORDER BY dropped_at, id;
