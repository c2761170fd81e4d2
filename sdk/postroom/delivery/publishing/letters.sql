-- Dead letters as they are published. The queries have the names and the parameters of those in events.sql, and do the
-- same; each letter is an aggregate by itself, for there is no order among them. What an operator has settled is neither
-- published nor lost.

-- name: claim_aggregates
-- The first $2 letters after $1 that are due. `claim` passes over what another publisher has in hand.
SELECT id AS aggregate, TRUE AS claimed, (SELECT pg_advisory_xact_lock_shared(1, 0)) AS publishing
FROM postroom.dead_letters
WHERE published_at IS NULL AND settled_at IS NULL AND id > $1 AND next_attempt_at <= now() ORDER BY id LIMIT $2;

-- name: claim
-- The first $2 of the letters $1, of $3 bytes at most (one at least).
WITH locked AS MATERIALIZED (
  SELECT id, letter_id, subject, letter, payload, epoch, publish_attempts FROM postroom.dead_letters
  WHERE id = ANY ($1::bigint[]) AND published_at IS NULL AND settled_at IS NULL AND next_attempt_at <= now()
  ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED
), measured AS (
  SELECT locked.*, sum(octet_length(letter) + octet_length(payload)) OVER (ORDER BY id)
    - octet_length(letter) - octet_length(payload) AS bytes_before
  FROM locked
)
SELECT id AS aggregate, 1 AS place, letter_id, subject, letter, payload, epoch, publish_attempts
FROM measured WHERE bytes_before < $3 ORDER BY id;

-- name: mark_published
-- Notes where the server put the letters $1, as in events.sql.
WITH placed AS MATERIALIZED (
  SELECT key, key::bigint AS id, stream, created_at, sequence
  FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::bigint[]) AS ack (key, stream, created_at, sequence)
), holder AS MATERIALIZED (
  SELECT letter.id, placed.id AS placed_id, placed.key AS placed_key,
    letter.stream_created_at = placed.created_at AS same_stream,
    letter.published_at > now() - $5::interval AND letter.settled_at IS NULL AND NOT postroom.is_settled(
      letter.stream, letter.stream_created_at, letter.stream_sequence, letter.subject
    ) AS lost
  FROM placed JOIN postroom.dead_letters AS letter
    ON letter.stream = placed.stream AND letter.stream_sequence = placed.sequence
      AND letter.published_at IS NOT NULL AND letter.id <> placed.id
), unsure AS MATERIALIZED (
  SELECT placed_id AS id, placed_key AS key FROM holder WHERE same_stream
), requeued AS (
  UPDATE postroom.dead_letters AS letter
  SET published_at = NULL, stream = NULL, stream_created_at = NULL, stream_sequence = NULL,
    epoch = epoch + 1, next_attempt_at = now()
  FROM (SELECT id FROM holder WHERE lost UNION SELECT id FROM unsure) AS again
  WHERE letter.id = again.id
), marked AS (
  UPDATE postroom.dead_letters AS letter
  SET published_at = clock_timestamp(), publish_attempts = publish_attempts + 1, publish_error = NULL,
    stream = placed.stream, stream_created_at = placed.created_at, stream_sequence = placed.sequence
  FROM placed WHERE letter.id = placed.id AND NOT EXISTS (SELECT FROM unsure WHERE unsure.id = placed.id)
)
SELECT key FROM unsure;

-- name: mark_failed
-- Counts an attempt of the letters $1: why it failed ($2), and in how many seconds the next one may be made ($3).
UPDATE postroom.dead_letters AS letter
SET publish_attempts = publish_attempts + 1, publish_error = failed.error,
  next_attempt_at = clock_timestamp() + failed.seconds * interval '1 second'
FROM unnest($1::text[], $2::text[], $3::float8[]) AS failed (key, error, seconds)
WHERE letter.id = failed.key::bigint;

-- name: backlog
-- The dead letters that wait to be published in a context (null: in all), since when, and how many failed before.
SELECT count(*) AS count, min(died_at) AS oldest_at, count(*) FILTER (WHERE publish_attempts > 0) AS failing
FROM postroom.dead_letters
WHERE published_at IS NULL AND settled_at IS NULL AND ($1::text IS NULL OR context = $1);

-- name: find_behind_the_end
-- Letters with a number beyond $2, the last of the stream $1; published between $3 and $4, and not settled; at most $5.
SELECT id::text FROM postroom.dead_letters
WHERE stream = $1 AND stream_sequence > $2 AND published_at > $3 AND published_at <= $4 AND settled_at IS NULL
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, subject)
LIMIT $5;

-- name: find_before_the_beginning
-- Letters with a number before $2, the first that the stream $1 still holds.
SELECT id::text FROM postroom.dead_letters
WHERE stream = $1 AND stream_sequence < $2 AND published_at > $3 AND published_at <= $4 AND settled_at IS NULL
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, subject)
LIMIT $5;

-- name: find_of_another_stream
-- Letters that went into a stream $1 that was created at another time than $2.
SELECT id::text FROM postroom.dead_letters
WHERE stream = $1 AND stream_created_at <> $2 AND published_at > $3 AND published_at <= $4 AND settled_at IS NULL
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, subject)
LIMIT $5;

-- name: newest_at
-- The letter with the highest number from $3 to $4 of the stream $1, created at $2, but for the numbers $5.
SELECT letter_id AS id, epoch, stream_sequence FROM postroom.dead_letters
WHERE stream = $1 AND stream_created_at = $2 AND stream_sequence BETWEEN $3 AND $4
  AND stream_sequence <> ALL ($5::bigint[]) AND published_at IS NOT NULL
ORDER BY stream_sequence DESC LIMIT 1;

-- name: find_taken_out
-- Letters of the work queue $1, as in events.sql.
SELECT id::text FROM postroom.dead_letters
WHERE stream = $1 AND stream_created_at = $2 AND (stream_sequence < $3 OR stream_sequence = ANY ($4::bigint[]))
  AND published_at > $5 AND settled_at IS NULL
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, subject)
LIMIT $6;

-- name: find_since
-- Letters published between $1 and $2 into the stream $3 (null: any), acknowledged ones too if $4; at most $5.
SELECT id::text FROM postroom.dead_letters
WHERE published_at > $1 AND published_at <= $2 AND ($3::text IS NULL OR stream = $3) AND settled_at IS NULL
  AND ($4 OR NOT postroom.is_settled(stream, stream_created_at, stream_sequence, subject))
LIMIT $5;

-- name: find_unhandled
-- Those of the letters $1 that are published, and not settled.
SELECT id::text FROM postroom.dead_letters
WHERE id = ANY ($1::text[]::bigint[]) AND published_at IS NOT NULL AND settled_at IS NULL
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, subject);

-- name: requeue
-- Makes the published letters $1 unpublished again, under the next epoch.
UPDATE postroom.dead_letters
SET published_at = NULL, stream = NULL, stream_created_at = NULL, stream_sequence = NULL,
  epoch = epoch + 1, next_attempt_at = now()
WHERE id = ANY ($1::text[]::bigint[]) AND published_at IS NOT NULL;

-- name: list_contexts
-- The contexts with letters that wait for their stream.
SELECT DISTINCT context FROM postroom.dead_letters WHERE published_at IS NULL AND settled_at IS NULL ORDER BY context;
