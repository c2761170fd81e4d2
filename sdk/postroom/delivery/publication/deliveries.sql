-- The deliveries of messages to members, from the broker's tables `mesh.delivery_queue`, `mesh.message` and
-- `mesh.member`; no other file of the room reads them. They are in the words of rows.sql; the aggregate is the recipient,
-- and its order that of the history.

\set table mesh.delivery_queue
\set key item.broker_message_id || '.' || item.recipient_id
\set is item.broker_message_id = split_part(wanted.key, '.', 1)::uuid AND item.recipient_id = split_part(wanted.key, '.', 2)::integer
\set identity item.broker_message_id || '.' || :owner
\set subject mesh.inbox_subject(item.recipient_id)
\set aggregate recipient_id
\set place history_id
\set lock hashint8extended(aggregate, 2)
\set owner (SELECT name FROM mesh.member WHERE member.id = item.recipient_id)
\set since item.enqueued_at
\set ours item.mesh_id = (SELECT id FROM mesh.mesh WHERE slug = $1)
\set confirmed FALSE
\set ended FALSE

-- name: horizon
-- How far the histories of the meshes of the recipients $1 are complete for the next statement: the meshes, the last number
-- of each, and the oldest transaction that may still write a lower one.
SELECT array_agg(mesh_id) AS meshes, array_agg(last_history_id) AS last_history_ids, array_agg(oldest) AS oldest
FROM mesh.history_horizon(ARRAY(SELECT DISTINCT mesh_id FROM mesh.member WHERE id = ANY ($1::integer[])));

-- name: claim
-- The oldest $2 unpublished deliveries of the recipients $1, of $3 bytes of bodies at most (one at least), where the
-- longest wait is $4, within the horizon $5 to $7: beyond it a lower number may still be committed, which is to be published
-- first. A row that was changed is behind the oldest transaction until that ends, and holds up what is behind it. Each row is
-- looked up by itself, as in events.sql, and a message by all of its keys: its plan is often made while the tables are empty,
-- and kept, and without one of them it would read the ids of the whole mesh for each message.
WITH oldest AS MATERIALIZED (
  SELECT following.*
  FROM unnest($1::integer[]) AS claimed (recipient_id), LATERAL (
    SELECT broker_message_id, recipient_id, mesh_id, history_id, xmin AS written_by,
      row_number() OVER (ORDER BY history_id) AS place
    FROM mesh.delivery_queue AS delivery
    WHERE published_at IS NULL AND delivery.recipient_id = claimed.recipient_id
    ORDER BY history_id LIMIT $2
  ) AS following
  JOIN unnest($5::integer[], $6::bigint[], $7::xid[]) AS horizon (mesh_id, last_history_id, oldest) USING (mesh_id)
  WHERE history_id <= last_history_id AND age(written_by) NOT BETWEEN 0 AND coalesce(age(horizon.oldest), -1)
  ORDER BY history_id LIMIT $2
), locked AS MATERIALIZED (
  SELECT oldest.place, delivery.*
  FROM oldest, LATERAL (
    SELECT epoch, publish_attempts, recipient_id, mesh_id, history_id FROM mesh.delivery_queue AS delivery
    WHERE delivery.broker_message_id = oldest.broker_message_id AND delivery.recipient_id = oldest.recipient_id
      AND delivery.history_id = oldest.history_id
      AND delivery.published_at IS NULL AND postroom.is_due(delivery.next_attempt_at, $4::interval)
    FOR UPDATE SKIP LOCKED
  ) AS delivery
), page AS (
  SELECT locked.place, locked.epoch, locked.publish_attempts, locked.recipient_id, member.name AS recipient, message.*
  FROM locked JOIN mesh.member ON member.id = locked.recipient_id, LATERAL (
    SELECT client_message_id FROM mesh.message_history AS history
    WHERE history.mesh_id = locked.mesh_id AND history.history_id = locked.history_id LIMIT 1
  ) AS known, LATERAL (
    SELECT * FROM mesh.message
    WHERE message.mesh_id = locked.mesh_id AND message.history_id = locked.history_id
      AND message.client_message_id = known.client_message_id LIMIT 1
  ) AS message
), measured AS (
  SELECT page.*, sum(octet_length(body)) OVER (ORDER BY history_id, recipient_id) - octet_length(body) AS bytes_before
  FROM page
)
SELECT broker_message_id || '.' || recipient AS id, recipient_id AS aggregate, mesh || '.inbox.' || recipient AS subject,
  measured.*
FROM measured WHERE bytes_before < $3 ORDER BY history_id, recipient_id;

-- name: drop
-- Takes the deliveries $1 out of the queue, those that were refused and are unpublished; $2 does it, because of $3.
WITH dropped AS (
  DELETE FROM mesh.delivery_queue AS delivery USING unnest($1::text[]) AS refused (key)
  WHERE delivery.broker_message_id = split_part(refused.key, '.', 1)::uuid
    AND delivery.recipient_id = split_part(refused.key, '.', 2)::integer
    AND delivery.published_at IS NULL AND delivery.publish_error IS NOT NULL
  RETURNING delivery.*
)
INSERT INTO postroom.dropped_deliveries (
  broker_message_id, recipient_id, recipient, subject, enqueued_at, publish_attempts, publish_error, dropped_by, reason
)
SELECT dropped.broker_message_id, dropped.recipient_id, member.name, mesh.inbox_subject(member.id),
  dropped.enqueued_at, dropped.publish_attempts, dropped.publish_error, $2, $3
FROM dropped JOIN mesh.member ON member.id = dropped.recipient_id
RETURNING broker_message_id || '.' || recipient_id AS id;

-- name: find_dropped
-- Who dropped those of the deliveries $1 that were dropped, and when.
SELECT id, dropped_by, dropped_at
FROM (SELECT *, broker_message_id || '.' || recipient_id AS id FROM postroom.dropped_deliveries) AS known
WHERE id = ANY ($1::text[]);

-- name: list_dropped
-- What was dropped of the mesh $1, or of all, the latest $2, oldest first.
SELECT * FROM (
  SELECT broker_message_id || '.' || recipient_id AS id, subject, recipient AS aggregate, publish_error AS error,
    dropped_at, dropped_by, reason
  FROM postroom.dropped_deliveries WHERE $1::text IS NULL OR starts_with(subject, $1 || '.')
  ORDER BY dropped_at DESC, broker_message_id, recipient_id LIMIT $2
) AS latest ORDER BY dropped_at, id;

-- name: list_meshes
-- The meshes whose streams the worker declares.
SELECT slug FROM mesh.mesh ORDER BY slug;

-- name: has_broker
-- Whether the broker's tables are in this database.
SELECT to_regclass('mesh.delivery_queue') IS NOT NULL;
