-- The deliveries of messages to members, out of the broker's tables `mesh.delivery_queue`, `mesh.message` and
-- `mesh.member`: the one place in delivering that knows them. The queries have the names and the parameters of those in
-- events.sql, and do the same; the aggregate is the recipient, and its order that of the history.

-- name: claim_aggregates
-- The first $2 recipients after $1 whose oldest unpublished delivery is due, and whether each is this transaction's now.
WITH RECURSIVE head AS (
  (
    SELECT recipient_id, next_attempt_at FROM mesh.delivery_queue
    WHERE published_at IS NULL AND recipient_id > $1 ORDER BY recipient_id, history_id LIMIT 1
  )
  UNION ALL
  SELECT following.* FROM head, LATERAL (
    SELECT recipient_id, next_attempt_at FROM mesh.delivery_queue
    WHERE published_at IS NULL AND recipient_id > head.recipient_id ORDER BY recipient_id, history_id LIMIT 1
  ) AS following
), due AS MATERIALIZED (
  SELECT recipient_id FROM head WHERE next_attempt_at <= now() LIMIT $2
)
SELECT recipient_id AS aggregate, pg_try_advisory_xact_lock(hashint8extended(recipient_id, 2)) AS claimed,
  (SELECT pg_advisory_xact_lock_shared(1, 0)) AS publishing
FROM due;

-- name: claim
-- The oldest $2 unpublished deliveries of the recipients $1, of $3 bytes of bodies at most (one at least); each row is
-- looked up by itself, as in events.sql.
WITH oldest AS MATERIALIZED (
  SELECT following.*
  FROM unnest($1::integer[]) AS claimed (recipient_id), LATERAL (
    SELECT broker_message_id, recipient_id, history_id, row_number() OVER (ORDER BY history_id) AS place
    FROM mesh.delivery_queue AS delivery
    WHERE published_at IS NULL AND delivery.recipient_id = claimed.recipient_id
    ORDER BY history_id LIMIT $2
  ) AS following
  ORDER BY history_id LIMIT $2
), locked AS MATERIALIZED (
  SELECT oldest.place, delivery.*
  FROM oldest, LATERAL (
    SELECT epoch, publish_attempts, recipient_id, mesh_id, history_id FROM mesh.delivery_queue AS delivery
    WHERE delivery.broker_message_id = oldest.broker_message_id AND delivery.recipient_id = oldest.recipient_id
      AND delivery.history_id = oldest.history_id
      AND delivery.published_at IS NULL AND delivery.next_attempt_at <= now()
    FOR UPDATE SKIP LOCKED
  ) AS delivery
), page AS (
  SELECT locked.place, locked.epoch, locked.publish_attempts, locked.recipient_id, member.name AS recipient, message.*
  FROM locked JOIN mesh.member ON member.id = locked.recipient_id, LATERAL (
    SELECT * FROM mesh.message
    WHERE message.mesh_id = locked.mesh_id AND message.history_id = locked.history_id LIMIT 1
  ) AS message
), measured AS (
  SELECT page.*, sum(octet_length(body)) OVER (ORDER BY history_id, recipient_id) - octet_length(body) AS bytes_before
  FROM page
)
SELECT broker_message_id || '.' || recipient AS id, recipient_id AS aggregate, mesh || '.inbox.' || recipient AS subject,
  measured.*
FROM measured WHERE bytes_before < $3 ORDER BY history_id, recipient_id;

-- name: mark_published
-- Notes where the server put the deliveries $1 (`broker_message_id.recipient_id`), as in events.sql.
WITH placed AS MATERIALIZED (
  SELECT split_part(key, '.', 1)::uuid AS broker_message_id, split_part(key, '.', 2)::integer AS recipient_id, ack.*
  FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::bigint[]) AS ack (key, stream, created_at, sequence)
), holder AS MATERIALIZED (
  SELECT delivery.broker_message_id, delivery.recipient_id, placed.key AS placed_key,
    placed.broker_message_id AS placed_message_id, placed.recipient_id AS placed_recipient_id,
    delivery.stream_created_at = placed.created_at AS same_stream,
    delivery.published_at > now() - $5::interval AND NOT postroom.is_settled(
      delivery.stream, delivery.stream_created_at, delivery.stream_sequence, mesh.inbox_subject(delivery.recipient_id)
    ) AS lost
  FROM placed JOIN mesh.delivery_queue AS delivery
    ON delivery.stream = placed.stream AND delivery.stream_sequence = placed.sequence
      AND delivery.published_at IS NOT NULL
      AND (delivery.broker_message_id, delivery.recipient_id) <> (placed.broker_message_id, placed.recipient_id)
), unsure AS MATERIALIZED (
  SELECT placed_key AS key, placed_message_id AS broker_message_id, placed_recipient_id AS recipient_id
  FROM holder WHERE same_stream
), requeued AS (
  UPDATE mesh.delivery_queue AS delivery
  SET published_at = NULL, stream = NULL, stream_created_at = NULL, stream_sequence = NULL,
    epoch = epoch + 1, next_attempt_at = now()
  FROM (
    SELECT broker_message_id, recipient_id FROM holder WHERE lost
    UNION SELECT broker_message_id, recipient_id FROM unsure
  ) AS again
  WHERE delivery.broker_message_id = again.broker_message_id AND delivery.recipient_id = again.recipient_id
), marked AS (
  UPDATE mesh.delivery_queue AS delivery
  SET published_at = clock_timestamp(), publish_attempts = publish_attempts + 1, publish_error = NULL,
    stream = placed.stream, stream_created_at = placed.created_at, stream_sequence = placed.sequence
  FROM placed
  WHERE delivery.broker_message_id = placed.broker_message_id AND delivery.recipient_id = placed.recipient_id
    AND NOT EXISTS (SELECT FROM unsure WHERE unsure.key = placed.key)
)
SELECT key FROM unsure;

-- name: mark_failed
-- Counts an attempt of the deliveries $1: why it failed ($2), and in how many seconds the next one may be made ($3).
UPDATE mesh.delivery_queue AS delivery
SET publish_attempts = publish_attempts + 1, publish_error = failed.error,
  next_attempt_at = clock_timestamp() + failed.seconds * interval '1 second'
FROM unnest($1::text[], $2::text[], $3::float8[]) AS failed (key, error, seconds)
WHERE delivery.broker_message_id = split_part(failed.key, '.', 1)::uuid
  AND delivery.recipient_id = split_part(failed.key, '.', 2)::integer;

-- name: backlog
-- The deliveries that wait to be published in a mesh (null: in all), since when, and how many failed before.
SELECT count(*) AS count, min(enqueued_at) AS oldest_at, count(*) FILTER (WHERE publish_attempts > 0) AS failing
FROM mesh.delivery_queue
WHERE published_at IS NULL AND ($1::text IS NULL OR mesh_id = (SELECT id FROM mesh.mesh WHERE slug = $1));

-- name: find_behind_the_end
-- Deliveries with a number beyond $2, the last of the stream $1; published between $3 and $4, and not settled; at most $5.
SELECT broker_message_id || '.' || recipient_id FROM mesh.delivery_queue
WHERE stream = $1 AND stream_sequence > $2 AND published_at > $3 AND published_at <= $4
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, mesh.inbox_subject(recipient_id))
LIMIT $5;

-- name: find_before_the_beginning
-- Deliveries with a number before $2, the first that the stream $1 still holds.
SELECT broker_message_id || '.' || recipient_id FROM mesh.delivery_queue
WHERE stream = $1 AND stream_sequence < $2 AND published_at > $3 AND published_at <= $4
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, mesh.inbox_subject(recipient_id))
LIMIT $5;

-- name: find_of_another_stream
-- Deliveries that went into a stream $1 that was created at another time than $2.
SELECT broker_message_id || '.' || recipient_id FROM mesh.delivery_queue
WHERE stream = $1 AND stream_created_at <> $2 AND published_at > $3 AND published_at <= $4
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, mesh.inbox_subject(recipient_id))
LIMIT $5;

-- name: newest_at
-- The delivery with the highest number from $3 to $4 of the stream $1, created at $2, but for the numbers $5.
SELECT delivery.broker_message_id || '.' || member.name AS id, delivery.epoch, delivery.stream_sequence
FROM mesh.delivery_queue AS delivery JOIN mesh.member ON member.id = delivery.recipient_id
WHERE delivery.stream = $1 AND delivery.stream_created_at = $2 AND delivery.stream_sequence BETWEEN $3 AND $4
  AND delivery.stream_sequence <> ALL ($5::bigint[]) AND delivery.published_at IS NOT NULL
ORDER BY delivery.stream_sequence DESC LIMIT 1;

-- name: find_taken_out
-- Deliveries of the work queue $1, as in events.sql.
SELECT broker_message_id || '.' || recipient_id FROM mesh.delivery_queue
WHERE stream = $1 AND stream_created_at = $2
  AND stream_sequence > coalesce((
    SELECT floor FROM postroom.work_queue_floors AS known
    WHERE known.stream = $1 AND known.stream_created_at = $2 AND known.filter = '>'
  ), 0)
  AND (stream_sequence < $3 OR stream_sequence = ANY ($4::bigint[]))
  AND published_at > $5
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, mesh.inbox_subject(recipient_id))
LIMIT $6;

-- name: find_since
-- Deliveries published between $1 and $2 into the stream $3 (null: any), settled ones too if $4; at most $5.
SELECT broker_message_id || '.' || recipient_id FROM mesh.delivery_queue
WHERE published_at > $1 AND published_at <= $2 AND ($3::text IS NULL OR stream = $3)
  AND ($4 OR NOT postroom.is_settled(stream, stream_created_at, stream_sequence, mesh.inbox_subject(recipient_id)))
LIMIT $5;

-- name: find_unhandled
-- Those of the deliveries $1 that are published, and not settled.
SELECT broker_message_id || '.' || recipient_id
FROM unnest($1::text[]) AS wanted (key) JOIN mesh.delivery_queue AS delivery
  ON delivery.broker_message_id = split_part(wanted.key, '.', 1)::uuid
    AND delivery.recipient_id = split_part(wanted.key, '.', 2)::integer
WHERE published_at IS NOT NULL
  AND NOT postroom.is_settled(stream, stream_created_at, stream_sequence, mesh.inbox_subject(recipient_id));

-- name: requeue
-- Makes the published deliveries $1 unpublished again, under the next epoch.
UPDATE mesh.delivery_queue AS delivery
SET published_at = NULL, stream = NULL, stream_created_at = NULL, stream_sequence = NULL,
  epoch = epoch + 1, next_attempt_at = now()
FROM unnest($1::text[]) AS lost (key)
WHERE delivery.broker_message_id = split_part(lost.key, '.', 1)::uuid
  AND delivery.recipient_id = split_part(lost.key, '.', 2)::integer AND delivery.published_at IS NOT NULL;

-- name: list_meshes
-- The meshes whose streams the worker looks after.
SELECT slug FROM mesh.mesh ORDER BY slug;

-- name: has_broker
-- Whether the broker's tables are in this database.
SELECT to_regclass('mesh.delivery_queue') IS NOT NULL;
