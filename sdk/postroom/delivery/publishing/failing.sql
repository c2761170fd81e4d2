-- name: list_events
-- The events that JetStream has refused, oldest first: of the context $1 (null: all), at most $2. `behind` counts what
-- waits in the same aggregate for it.
SELECT event.id::text AS id, event.subject, event.aggregate_id AS aggregate, event.publish_attempts AS attempts,
  event.publish_error AS error, event.occurred_at, event.next_attempt_at, (
    SELECT count(*) FROM postroom.outbox_events AS other
    WHERE other.published_at IS NULL AND other.aggregate_id = event.aggregate_id AND other.position > event.position
  ) AS behind
FROM postroom.outbox_events AS event
WHERE event.published_at IS NULL AND event.publish_error IS NOT NULL
  AND ($1::text IS NULL OR starts_with(event.subject, $1 || '.') OR starts_with(event.subject, 'cmd.' || $1 || '.'))
ORDER BY event.position LIMIT $2;

-- name: drop_events
-- Moves the events $1 out of the outbox, those that were refused and are unpublished; $2 does it, because of $3.
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

-- name: list_dropped_events
-- What was dropped, the latest $1, oldest first.
SELECT * FROM (
  SELECT id::text AS id, subject, aggregate_id AS aggregate, publish_error AS error, dropped_at, dropped_by, reason
  FROM postroom.dropped_events ORDER BY dropped_at DESC, id LIMIT $1
) AS latest ORDER BY dropped_at, id;

-- name: list_deliveries
-- The same of deliveries; the aggregate is the recipient.
SELECT delivery.broker_message_id || '.' || delivery.recipient_id AS id, mesh.inbox_subject(member.id) AS subject,
  member.name AS aggregate, delivery.publish_attempts AS attempts, delivery.publish_error AS error,
  delivery.enqueued_at AS occurred_at, delivery.next_attempt_at, (
    SELECT count(*) FROM mesh.delivery_queue AS other
    WHERE other.published_at IS NULL AND other.recipient_id = delivery.recipient_id
      AND other.history_id > delivery.history_id
  ) AS behind
FROM mesh.delivery_queue AS delivery
JOIN mesh.mesh ON mesh.id = delivery.mesh_id
JOIN mesh.member ON member.id = delivery.recipient_id
WHERE delivery.published_at IS NULL AND delivery.publish_error IS NOT NULL AND ($1::text IS NULL OR mesh.slug = $1)
ORDER BY delivery.enqueued_at, delivery.history_id, delivery.recipient_id LIMIT $2;

-- name: drop_deliveries
-- The same of the deliveries $1 (`broker_message_id.recipient_id`).
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

-- name: list_dropped_deliveries
-- The same of deliveries.
SELECT * FROM (
  SELECT broker_message_id || '.' || recipient_id AS id, subject, recipient AS aggregate, publish_error AS error,
    dropped_at, dropped_by, reason
  FROM postroom.dropped_deliveries ORDER BY dropped_at DESC, broker_message_id, recipient_id LIMIT $1
) AS latest ORDER BY dropped_at, id;
