-- Messages for activities that the worker which takes them does not have.

-- name: set_aside
-- Keeps the message $2 of the activity $1, for leg $3, with the answer $4 to the request $5 that came as the event $6 in the
-- trace $7, as the worker $8 does not have that activity. No row: the message is done, its job has ended for good, or there is none.
INSERT INTO ledger.set_aside (activity_id, guid, leg, answer, request_id, event, traceparent, worker)
SELECT activity.id, $2, $3, $4, $5, $6, $7, $8
FROM ledger.activity JOIN ledger.job ON job.id = activity.job_id
  LEFT JOIN ledger.guid ON guid.activity_id = activity.id AND guid.guid = $2
WHERE activity.id = $1 AND job.state IN ('running', 'closed', 'failed')
  AND (ledger.is_set(guid.ledger, 1000000000)
    AND (ledger.is_set(guid.ledger, 100000000) OR NOT ledger.is_set(guid.ledger, 100000000000))) IS NOT TRUE
ON CONFLICT (activity_id, guid) DO UPDATE SET at = excluded.at, worker = excluded.worker
RETURNING activity_id;

-- name: bring_back
-- Has messages go out again that were set aside, oldest first and at most $3, of the activities $2 of the flow $1, where
-- their jobs have not ended; each as the message that it was. Their requests have all their time again.
WITH chosen AS (
  SELECT set_aside.*, job.id AS job_id, job.context, job.flow, activity.name,
    coalesce(set_aside.traceparent, activity.traceparent) AS trace
  FROM ledger.set_aside JOIN ledger.activity ON activity.id = set_aside.activity_id
    JOIN ledger.job ON job.id = activity.job_id
  WHERE job.flow = $1 AND activity.name = ANY ($2::text[]) AND job.state IN ('running', 'closed')
  ORDER BY set_aside.at
  LIMIT $3
  FOR UPDATE OF set_aside SKIP LOCKED
), brought AS (
  DELETE FROM ledger.set_aside USING chosen
  WHERE set_aside.activity_id = chosen.activity_id AND set_aside.guid = chosen.guid
), prolonged AS (
  UPDATE ledger.request SET due_at = clock_timestamp() + request.timeout
  FROM chosen
  WHERE request.id = chosen.request_id AND request.due_at IS NOT NULL
)
SELECT postroom.emit(context, 'activity', activity_id::text,
  CASE leg WHEN 1 THEN 'activity_spawned' ELSE 'activity_retried' END,
  jsonb_build_object('job', job_id, 'activity', activity_id, 'flow', flow, 'name', name, 'guid', guid)
    || CASE leg WHEN 1 THEN '{}' ELSE jsonb_build_object('answer', answer, 'request', request_id, 'event', event) END,
  correlation_id => job_id, traceparent => trace)
FROM chosen;
