-- name: fill
-- $1 messages of 1 KiB to the topic `orders`, as accepts would have left them, ids in time order.
WITH sender AS (
  SELECT member.mesh_id, member.id AS sender_id, topic.id AS topic_id
  FROM mesh.member JOIN mesh.topic ON topic.mesh_id = member.mesh_id AND topic.name = 'orders' WHERE member.name = 'alice'
), message AS MATERIALIZED (
  SELECT sender.*, number AS history_id, '01J' || lpad(number::text, 20, '0') AS client_message_id,
    (lpad(to_hex(1760000000000 + number), 12, '0') || '7000' || substr(md5(number::text), 1, 16))::uuid AS id
  FROM sender, generate_series(1, $1::bigint) AS number
), messages AS (
  INSERT INTO mesh.topic_message (
    broker_message_id, mesh_id, history_id, client_message_id, sender_id, topic_id, priority, body, body_is_text
  )
  SELECT id, mesh_id, history_id, client_message_id, sender_id, topic_id, 'next',
    convert_to('{"order":' || history_id || ',"note":"' || repeat(md5(history_id::text), 31) || '"}', 'UTF8'), true
  FROM message
), known AS (
  INSERT INTO mesh.client_message_dedupe (
    mesh_id, client_message_id, sender_id, broker_message_id, history_id, request_fingerprint, destination_kind,
    destination_ref
  )
  SELECT mesh_id, client_message_id, sender_id, id, history_id, sha256(client_message_id::bytea), 'topic', 'orders' FROM message
)
INSERT INTO mesh.message_history (
  mesh_id, history_id, broker_message_id, client_message_id, sender_id, destination_kind, destination_id,
  destination_ref, recipients, expires_at
)
SELECT mesh_id, history_id, id, client_message_id, sender_id, 'topic', topic_id, 'orders', 1, now() + interval '90 days'
FROM message;

-- name: settle
-- What autovacuum would have done by the time that somebody reads.
VACUUM ANALYZE;
