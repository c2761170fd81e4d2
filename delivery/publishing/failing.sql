-- name: list_failing
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

-- name: drop
-- Moves the events $1 out of the outbox, those that were refused and are unpublished; $2 does it, because of $3.
WITH dropped AS (
  DELETE FROM postroom.outbox_events
  WHERE id = ANY ($1::uuid[]) AND published_at IS NULL AND publish_error IS NOT NULL
  RETURNING *
)
INSERT INTO postroom.dropped_events (
  id, aggregate_type, aggregate_id, event_type, event_version, subject, payload, occurred_at, correlation_id,
  causation_id, publish_attempts, publish_error, dropped_by, reason
)
SELECT id, aggregate_type, aggregate_id, event_type, event_version, subject, payload, occurred_at, correlation_id,
  causation_id, publish_attempts, publish_error, $2, $3
FROM dropped
RETURNING id::text;

-- name: list_dropped
-- What was dropped, the latest $1, oldest first.
SELECT * FROM (
  SELECT id::text AS id, subject, aggregate_id AS aggregate, publish_error AS error, dropped_at, dropped_by, reason
  FROM postroom.dropped_events ORDER BY dropped_at DESC, id LIMIT $1
) AS latest ORDER BY dropped_at, id;
