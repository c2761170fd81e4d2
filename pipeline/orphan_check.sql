-- name: violations
-- The same question as `find_orphans` of the worker asks (postroom/worker/orphans.sql), in Spark's SQL, over the same tables.
WITH live AS (
  SELECT * FROM postroom_dedupe WHERE history_available
), violation AS (
  SELECT 'dedupe_without_message' AS kind, live.broker_message_id FROM live
  LEFT ANTI JOIN postroom_message AS message
    ON message.broker_message_id = live.broker_message_id AND message.destination_kind = live.destination_kind
  UNION ALL
  SELECT 'dedupe_without_history', live.broker_message_id FROM live
  LEFT ANTI JOIN postroom_history_row AS history
    ON history.broker_message_id = live.broker_message_id
    AND history.mesh_id = live.mesh_id AND history.history_id = live.history_id
  UNION ALL
  SELECT 'message_without_event', message.broker_message_id FROM postroom_message AS message
  LEFT ANTI JOIN postroom_announced AS announced
    ON announced.broker_message_id = message.broker_message_id
    AND announced.destination_kind = message.destination_kind
  WHERE message.destination_kind <> 'dm' AND message.accepted_at > :events_kept_from
  UNION ALL
  SELECT 'event_without_message', announced.broker_message_id FROM postroom_announced AS announced
  LEFT ANTI JOIN postroom_message AS message
    ON announced.broker_message_id = message.broker_message_id
    AND announced.destination_kind = message.destination_kind
  LEFT ANTI JOIN (SELECT broker_message_id FROM postroom_dedupe WHERE NOT history_available) AS tombstone
    ON tombstone.broker_message_id = announced.broker_message_id
  WHERE announced.occurred_at > :ids_kept_from
  UNION ALL
  SELECT 'deliveries_incomplete', history.broker_message_id FROM postroom_history_row AS history
  LEFT JOIN (
    SELECT broker_message_id, count(*) AS deliveries FROM (
      SELECT broker_message_id FROM postroom_delivery
      UNION ALL SELECT broker_message_id FROM postroom_dropped_delivery
    ) GROUP BY broker_message_id
  ) AS queued ON queued.broker_message_id = history.broker_message_id
  WHERE history.recipients <> coalesce(queued.deliveries, 0)
  UNION ALL
  SELECT rest.kind, rest.broker_message_id FROM (
    SELECT 'message_without_dedupe' AS kind, broker_message_id FROM postroom_message
    UNION ALL SELECT 'history_without_dedupe', broker_message_id FROM postroom_history_row
    UNION ALL SELECT 'delivery_without_dedupe', broker_message_id FROM postroom_delivery
    UNION ALL SELECT 'mention_without_dedupe', broker_message_id FROM postroom_mention
  ) AS rest
  LEFT ANTI JOIN live ON live.broker_message_id = rest.broker_message_id
), shown AS (
  SELECT kind, broker_message_id, count(*) AS rows,
    row_number() OVER (PARTITION BY kind ORDER BY broker_message_id) AS place
  FROM violation GROUP BY kind, broker_message_id
)
SELECT kind, sum(rows) AS rows, array_sort(collect_list(CASE WHEN place <= 10 THEN broker_message_id END)) AS examples
FROM shown GROUP BY kind ORDER BY kind;
