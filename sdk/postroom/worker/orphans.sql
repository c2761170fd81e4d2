-- name: find_orphans
-- Every row that an accept should have written, or that is left without one (docs/contract/accept.md#accept-38).
-- $1 is the least time that an event is kept, from the accept on: an older one may have been pruned. $2 is the least time
-- that an id is recognised: an older event may have outlived its message and that message's tombstone.
WITH live AS MATERIALIZED (
  SELECT * FROM mesh.client_message_dedupe WHERE history_available
), message AS MATERIALIZED (
  SELECT broker_message_id, 'topic' AS destination_kind, accepted_at FROM mesh.topic_message
  UNION ALL
  SELECT broker_message_id, CASE WHEN recipient_id IS NULL THEN 'queue' ELSE 'dm' END, accepted_at
  FROM mesh.message_queue
), announced AS (
  -- Services write events of their own into the same table, of any aggregate: an accept's has its own id in the payload.
  -- One that an operator dropped counts as well.
  SELECT id AS broker_message_id, aggregate_type AS destination_kind, occurred_at FROM (
    SELECT id, aggregate_type, aggregate_id, event_type, payload, occurred_at FROM postroom.outbox_events
    UNION ALL
    SELECT id, aggregate_type, aggregate_id, event_type, payload, occurred_at FROM postroom.dropped_events
  ) AS event
  WHERE aggregate_type IN ('topic', 'queue')
    AND aggregate_id = (payload ->> 'mesh') || '/' || aggregate_type || ':' || event_type
    AND payload ->> 'broker_message_id' = id::text
), violation AS (
  SELECT 'dedupe_without_message' AS kind, broker_message_id FROM live
  WHERE NOT EXISTS (
    SELECT FROM message
    WHERE message.broker_message_id = live.broker_message_id AND message.destination_kind = live.destination_kind
  )
  UNION ALL
  SELECT 'dedupe_without_history', broker_message_id FROM live
  WHERE NOT EXISTS (
    SELECT FROM mesh.message_history AS history
    WHERE history.broker_message_id = live.broker_message_id
      AND history.mesh_id = live.mesh_id AND history.history_id = live.history_id
  )
  UNION ALL
  SELECT 'message_without_event', broker_message_id FROM message
  WHERE destination_kind <> 'dm' AND accepted_at > now() - $1::interval
    AND NOT EXISTS (
      SELECT FROM announced
      WHERE announced.broker_message_id = message.broker_message_id
        AND announced.destination_kind = message.destination_kind
    )
  UNION ALL
  SELECT 'event_without_message', broker_message_id FROM announced
  WHERE occurred_at > now() - $2::interval
    AND NOT EXISTS (
      SELECT FROM message
      WHERE message.broker_message_id = announced.broker_message_id
        AND message.destination_kind = announced.destination_kind
    )
    AND NOT EXISTS (
      SELECT FROM mesh.client_message_dedupe AS tombstone
      WHERE tombstone.broker_message_id = announced.broker_message_id AND NOT tombstone.history_available
    )
  UNION ALL
  SELECT 'deliveries_incomplete', history.broker_message_id
  FROM mesh.message_history AS history
  LEFT JOIN (
    SELECT broker_message_id, count(*) AS deliveries
    FROM (
      SELECT broker_message_id FROM mesh.delivery_queue
      UNION ALL SELECT broker_message_id FROM postroom.dropped_deliveries
    ) AS delivery GROUP BY broker_message_id
  ) AS queued USING (broker_message_id)
  WHERE history.recipients <> coalesce(queued.deliveries, 0)
  UNION ALL
  SELECT kind, rest.broker_message_id
  FROM (
    SELECT 'message_without_dedupe' AS kind, broker_message_id FROM message
    UNION ALL SELECT 'history_without_dedupe', broker_message_id FROM mesh.message_history
    UNION ALL SELECT 'delivery_without_dedupe', broker_message_id FROM mesh.delivery_queue
    UNION ALL SELECT 'mention_without_dedupe', broker_message_id FROM mesh.mention_index
  ) AS rest
  WHERE NOT EXISTS (SELECT FROM live WHERE live.broker_message_id = rest.broker_message_id)
)
SELECT kind, count(*) AS rows, (array_agg(DISTINCT broker_message_id))[1:10] AS examples
FROM violation GROUP BY kind ORDER BY kind;

-- name: lead_checking
-- Whether this connection checks for orphans: one does, of all workers; the lock goes with the connection.
SELECT pg_try_advisory_lock(hashtext('postroom.broker.orphan-check'));

-- name: record_check
-- Keeps what a check for orphans found ($2, JSON) that began at $1.
INSERT INTO mesh.orphan_check (checked_at, violations) VALUES ($1, $2)
ON CONFLICT (only_row) DO UPDATE SET checked_at = excluded.checked_at, violations = excluded.violations;

-- name: last_check
-- What the last check for orphans found, and when it began; one that a clock ahead has dated does not count.
SELECT checked_at, violations FROM mesh.orphan_check WHERE checked_at <= clock_timestamp();
