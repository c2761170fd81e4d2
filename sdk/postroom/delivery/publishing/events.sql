-- name: claim_aggregates
-- The first $2 aggregates after $1 whose oldest unpublished event is due, and of each whether it is this transaction's
-- now: the advisory lock is let go with the transaction, after what it wrote can be seen. One index probe an aggregate,
-- however long its backlog. The other lock, which all publishers share, is what `await_marks` (record.sql) waits for.
WITH RECURSIVE head AS (
  (
    SELECT aggregate_id, next_attempt_at FROM postroom.outbox_events
    WHERE published_at IS NULL AND aggregate_id > $1 ORDER BY aggregate_id, position LIMIT 1
  )
  UNION ALL
  SELECT following.* FROM head, LATERAL (
    SELECT aggregate_id, next_attempt_at FROM postroom.outbox_events
    WHERE published_at IS NULL AND aggregate_id > head.aggregate_id ORDER BY aggregate_id, position LIMIT 1
  ) AS following
), due AS MATERIALIZED (
  SELECT aggregate_id FROM head WHERE next_attempt_at <= now() LIMIT $2
)
SELECT aggregate_id AS aggregate, pg_try_advisory_xact_lock(hashtextextended(aggregate_id, 1)) AS claimed,
  (SELECT pg_advisory_xact_lock_shared(1, 0)) AS publishing
FROM due;

-- name: claim
-- The oldest $2 unpublished events of the aggregates $1, of $3 bytes at most (one at least). `place` counts within the
-- aggregate: where a number is missing, a row is held by somebody else or not due, and nothing behind it may go. Each row
-- is looked up by itself (LATERAL): after a quiet time the planner believes that nothing is unpublished, and would join
-- every row with every other.
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
    AND event.published_at IS NULL AND event.next_attempt_at <= now()
  FOR UPDATE SKIP LOCKED
) AS event
WHERE oldest.bytes_before < $3
ORDER BY event.position;

-- name: mark_published
-- Notes where the server put the events $1: streams $2, their creations $3 and the numbers in them $4. An event that was
-- noted under one of these numbers before is lost, since the stream gave its number away: it is published again, unless
-- it was confirmed or settled, or is older than $5. But where that was the same stream, by its creation, either may be the lost one:
-- a worker may be stopped between the server's word and this. So the new one is not noted, and published again too.
-- Returns those.
WITH placed AS MATERIALIZED (
  SELECT * FROM unnest($1::uuid[], $2::text[], $3::timestamptz[], $4::bigint[]) AS ack (id, stream, created_at, sequence)
), holder AS MATERIALIZED (
  SELECT event.id, placed.id AS placed_id, event.stream_created_at = placed.created_at AS same_stream,
    event.published_at > now() - $5::interval
      AND NOT postroom.is_settled(event.stream, event.stream_created_at, event.stream_sequence, event.subject)
      AND NOT postroom.is_confirmed(event.id::text, event.subject) AS lost
  FROM placed JOIN postroom.outbox_events AS event
    ON event.stream = placed.stream AND event.stream_sequence = placed.sequence
      AND event.published_at IS NOT NULL AND event.id <> placed.id
), unsure AS MATERIALIZED (
  SELECT placed_id AS id FROM holder WHERE same_stream
), requeued AS (
  UPDATE postroom.outbox_events AS event
  SET published_at = NULL, stream = NULL, stream_created_at = NULL, stream_sequence = NULL,
    epoch = epoch + 1, next_attempt_at = now()
  FROM (SELECT id FROM holder WHERE lost UNION SELECT id FROM unsure) AS again
  WHERE event.id = again.id
), marked AS (
  UPDATE postroom.outbox_events AS event
  SET published_at = clock_timestamp(), publish_attempts = publish_attempts + 1, publish_error = NULL,
    stream = placed.stream, stream_created_at = placed.created_at, stream_sequence = placed.sequence
  FROM placed WHERE event.id = placed.id AND NOT EXISTS (SELECT FROM unsure WHERE unsure.id = placed.id)
)
SELECT id::text FROM unsure;

-- name: mark_failed
-- Counts an attempt of the events $1: why it failed ($2), and in how many seconds the next one may be made ($3).
UPDATE postroom.outbox_events AS event
SET publish_attempts = publish_attempts + 1, publish_error = failed.error,
  next_attempt_at = clock_timestamp() + failed.seconds * interval '1 second'
FROM unnest($1::uuid[], $2::text[], $3::float8[]) AS failed (id, error, seconds)
WHERE event.id = failed.id;

-- name: backlog
-- The events that wait to be published in a context (null: in all), since when, and how many failed before.
SELECT count(*) AS count, min(occurred_at) AS oldest_at, count(*) FILTER (WHERE publish_attempts > 0) AS failing
FROM postroom.outbox_events
WHERE published_at IS NULL
  AND ($1::text IS NULL OR starts_with(subject, $1 || '.') OR starts_with(subject, 'cmd.' || $1 || '.'));

-- name: find_behind_the_end
-- Events with a number beyond $2, the last that the stream $1 gave out: a server lost its newest. Published between $3
-- and $4, neither confirmed nor settled; at most $5.
SELECT id FROM postroom.outbox_events
WHERE stream = $1 AND stream_sequence > $2 AND published_at > $3 AND published_at <= $4
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, subject)
  AND NOT postroom.is_confirmed(id::text, subject)
LIMIT $5;

-- name: find_before_the_beginning
-- Events with a number before $2, the first that the stream $1 still holds: it was purged. The rest as above.
SELECT id FROM postroom.outbox_events
WHERE stream = $1 AND stream_sequence < $2 AND published_at > $3 AND published_at <= $4
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, subject)
  AND NOT postroom.is_confirmed(id::text, subject)
LIMIT $5;

-- name: find_of_another_stream
-- Events that went into a stream $1 that was created at another time than $2, which is gone. The rest as above.
SELECT id FROM postroom.outbox_events
WHERE stream = $1 AND stream_created_at <> $2 AND published_at > $3 AND published_at <= $4
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, subject)
  AND NOT postroom.is_confirmed(id::text, subject)
LIMIT $5;

-- name: newest_at
-- The event with the highest number from $3 to $4 of the stream $1, created at $2, but for the numbers $5.
SELECT id::text AS id, epoch, stream_sequence FROM postroom.outbox_events
WHERE stream = $1 AND stream_created_at = $2 AND stream_sequence BETWEEN $3 AND $4
  AND stream_sequence <> ALL ($5::bigint[]) AND published_at IS NOT NULL
ORDER BY stream_sequence DESC LIMIT 1;

-- name: find_taken_out
-- Events of the work queue $1, created at $2, that are no longer in it: with a number before $3, its first, or one of $4.
-- Published after $5, neither confirmed nor settled; at most $6. The first condition is the floor of all subjects, for
-- the index.
SELECT id FROM postroom.outbox_events
WHERE stream = $1 AND stream_created_at = $2
  AND stream_sequence > coalesce((
    SELECT floor FROM postroom.work_queue_floors AS known
    WHERE known.stream = $1 AND known.stream_created_at = $2 AND known.filter = '>'
  ), 0)
  AND (stream_sequence < $3 OR stream_sequence = ANY ($4::bigint[]))
  AND published_at > $5
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, subject)
  AND NOT postroom.is_confirmed(id::text, subject)
LIMIT $6;

-- name: find_since
-- Events published between $1 and $2 into the stream $3 (null: any), confirmed and settled ones too if $4; at most $5.
SELECT id FROM postroom.outbox_events
WHERE published_at > $1 AND published_at <= $2 AND ($3::text IS NULL OR stream = $3)
  AND ($4 OR NOT (
    postroom.is_settled(stream, stream_created_at, stream_sequence, subject)
    OR postroom.is_confirmed(id::text, subject)
  ))
LIMIT $5;

-- name: find_unhandled
-- Those of the events $1 that are published, and neither confirmed nor settled.
SELECT id::text FROM postroom.outbox_events
WHERE id = ANY ($1::uuid[]) AND published_at IS NOT NULL
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, subject)
  AND NOT postroom.is_confirmed(id::text, subject);

-- name: requeue
-- Makes the published events $1 unpublished again, under the next epoch.
UPDATE postroom.outbox_events
SET published_at = NULL, stream = NULL, stream_created_at = NULL, stream_sequence = NULL,
  epoch = epoch + 1, next_attempt_at = now()
WHERE id = ANY ($1::uuid[]) AND published_at IS NOT NULL;

-- name: prune
-- Deletes up to $2 events that were published before $1: the record of them ends.
DELETE FROM postroom.outbox_events WHERE id IN (
  SELECT id FROM postroom.outbox_events WHERE published_at < $1 LIMIT $2 FOR UPDATE SKIP LOCKED
);
