-- What is known of one message, for an operator who found its id in a log.

-- name: find_message
-- What the message $1 was to activities; $2 is the same as a UUID, or null where it is none. `what` is `answer` where leg 2
-- runs for it, `set_aside` and `missed` where it waits to come again, `request` where it asks, `event` where it moves an
-- activity on, and `activity` where it is no message but that.
WITH found AS (
  SELECT 'answer' AS what, activity_id, ledger::bigint, attempts AS times, last_error AS error, answer AS said,
    NULL::text AS by, NULL::timestamptz AS at
  FROM ledger.guid WHERE guid = $1
  UNION ALL
  SELECT 'set_aside', activity_id, NULL, NULL, NULL, answer, worker, set_aside.at FROM ledger.set_aside WHERE guid = $1
  UNION ALL
  SELECT 'missed', activity_id, NULL, NULL, NULL, answer, NULL, NULL FROM ledger.missed WHERE guid = $1
  UNION ALL
  SELECT 'request', activity_id, NULL, asked, event.publish_error, event.payload, answered_by, due_at
  FROM ledger.request LEFT JOIN postroom.outbox_events AS event ON event.id = request.id
  WHERE request.id = $2
  UNION ALL
  SELECT 'event', activity.id, NULL, NULL, event.publish_error, NULL, event.event_type, event.published_at
  FROM postroom.outbox_events AS event JOIN ledger.activity
    ON activity.id = CASE WHEN event.aggregate_id ~ '^[0-9a-f-]{36}$' THEN event.aggregate_id::uuid END
  WHERE event.id = $2 AND event.event_type IN ('activity_spawned', 'activity_cycled', 'activity_retried')
  UNION ALL
  SELECT 'activity', id, ledger::bigint, NULL, coalesce(error, last_error), request, NULL, spawned_at
  FROM ledger.activity WHERE id = $2
)
SELECT found.*, activity.name, activity.job_id, job.state, job.flow, job.context
FROM found JOIN ledger.activity ON activity.id = found.activity_id JOIN ledger.job ON job.id = activity.job_id
ORDER BY job.started_at, found.what;
