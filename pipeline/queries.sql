-- name: export_snapshot
-- This transaction's snapshot, for other connections to import, and its time.
SELECT pg_export_snapshot() AS name, now() AS now;

-- name: blocks
-- How many blocks a table has.
SELECT pg_relation_size($1::text::regclass) / current_setting('block_size')::integer AS blocks;

-- name: table_rows
-- The rows of a table, in some of its blocks.
SELECT * FROM {table}
WHERE ctid >= ('(' || $1::bigint || ',0)')::tid AND ctid < ('(' || $2::bigint || ',0)')::tid;

-- name: topic_message_rows
-- The messages to topics, in some blocks of their table.
SELECT broker_message_id, 'topic' AS destination_kind, accepted_at
FROM {table}
WHERE ctid >= ('(' || $1::bigint || ',0)')::tid AND ctid < ('(' || $2::bigint || ',0)')::tid;

-- name: message_queue_rows
-- The messages to one receiver, in some blocks of their table.
SELECT broker_message_id, CASE WHEN recipient_id IS NULL THEN 'queue' ELSE 'dm' END AS destination_kind, accepted_at
FROM {table}
WHERE ctid >= ('(' || $1::bigint || ',0)')::tid AND ctid < ('(' || $2::bigint || ',0)')::tid;

-- name: event_rows
-- The events that accepts wrote, in some blocks of the event outbox, into which other services write events of their own, or
-- of the table of those that an operator dropped.
SELECT id AS broker_message_id, aggregate_type AS destination_kind, occurred_at
FROM {table}
WHERE ctid >= ('(' || $1::bigint || ',0)')::tid AND ctid < ('(' || $2::bigint || ',0)')::tid
  AND aggregate_type IN ('topic', 'queue')
  AND aggregate_id = (payload ->> 'mesh') || '/' || aggregate_type || ':' || event_type
  AND payload ->> 'broker_message_id' = id::text;

-- name: audit_rows
-- The messages in a range of a mesh's history, before $4, without their bodies.
SELECT to_char(history.accepted_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS day, mesh.slug AS mesh, history.history_id,
  history.accepted_at, history.broker_message_id, history.client_message_id, sender.name AS sender,
  destination_kind || ':' || destination_ref AS "to", history.recipients,
  (
    SELECT encode(dedupe.request_fingerprint, 'hex') FROM mesh.client_message_dedupe AS dedupe
    WHERE dedupe.mesh_id = history.mesh_id AND dedupe.client_message_id = history.client_message_id
  ) AS request_fingerprint
FROM mesh.message_history AS history
JOIN mesh.mesh ON mesh.id = history.mesh_id
JOIN mesh.member AS sender ON sender.id = history.sender_id
WHERE history.mesh_id = $1 AND history.history_id > $2 AND history.history_id <= $3 AND history.accepted_at < $4;

-- name: deleted_to
-- When the last message was accepted that retention has deleted, null where it has deleted none.
SELECT max(last_accepted_at) AS deleted_to FROM mesh.history_deletion;

-- name: latency_rows
-- How long the messages in a range of a mesh's history took, accepted from $4 on and before $5: until each delivery and
-- event was published, and until each consumer had handled it. In milliseconds.
WITH message AS (
  SELECT broker_message_id, destination_kind || ':' || destination_ref AS "to", history.accepted_at, mesh.slug AS mesh
  FROM mesh.message_history AS history JOIN mesh.mesh ON mesh.id = history.mesh_id
  WHERE history.mesh_id = $1 AND history_id > $2 AND history_id <= $3
    AND accepted_at >= coalesce($4::timestamptz, '-infinity') AND accepted_at < coalesce($5::timestamptz, 'infinity')
), step AS (
  SELECT mesh, "to", accepted_at, 'published' AS stage, delivery.published_at AS at
  FROM message JOIN mesh.delivery_queue AS delivery USING (broker_message_id)
  UNION ALL
  SELECT mesh, "to", accepted_at, 'published', event.published_at
  FROM message JOIN postroom.outbox_events AS event ON event.id = message.broker_message_id
  UNION ALL
  SELECT mesh, "to", accepted_at, 'handled', inbox.processed_at
  FROM message JOIN postroom.inbox_messages AS inbox
    ON inbox.source_context = message.mesh AND inbox.message_id = message.broker_message_id::text
)
SELECT to_char(accepted_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS day, mesh, "to", stage, extract(epoch FROM at - accepted_at)::double precision * 1000 AS milliseconds
FROM step WHERE at IS NOT NULL;

-- name: count_windows
-- Keeps the greater count of each window: a recount misses what retention has deleted meanwhile.
INSERT INTO pipeline.rate_limit_counter (mesh, member, window_start, window_seconds, messages)
SELECT * FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::integer[], $5::bigint[])
ON CONFLICT (mesh, member, window_seconds, window_start) DO UPDATE
SET messages = excluded.messages WHERE excluded.messages > rate_limit_counter.messages;

-- name: index_messages
-- The words of messages, each once; a message never changes. Of a long one only the beginning is indexed.
INSERT INTO pipeline.search_index (mesh, history_id, broker_message_id, sender, destination, accepted_at, words)
SELECT mesh, history_id, broker_message_id, sender, destination, accepted_at, to_tsvector('simple', left(body, 100000))
FROM unnest($1::text[], $2::bigint[], $3::uuid[], $4::text[], $5::text[], $6::timestamptz[], $7::text[])
  AS batch (mesh, history_id, broker_message_id, sender, destination, accepted_at, body)
ON CONFLICT (mesh, history_id) DO NOTHING;

-- name: forget_words
-- Deletes the words of messages that retention has deleted, of one mesh or of all.
DELETE FROM pipeline.search_index AS found
WHERE ($1::text IS NULL OR found.mesh = $1) AND NOT EXISTS (
  SELECT FROM mesh.message_history AS history JOIN mesh.mesh ON mesh.id = history.mesh_id
  WHERE mesh.slug = found.mesh AND history.history_id = found.history_id
    AND history.broker_message_id = found.broker_message_id
);

-- name: count_words
-- How many messages the index has, of one mesh or of all.
SELECT count(*) FROM pipeline.search_index WHERE $1::text IS NULL OR mesh = $1;

-- name: sum_windows
-- How many windows there are, and how many messages they count, of one mesh or of all.
SELECT count(*) AS windows, coalesce(sum(messages), 0)::bigint AS messages
FROM pipeline.rate_limit_counter WHERE window_seconds = $1 AND ($2::text IS NULL OR mesh = $2);
