-- The engine's queries besides its steps.

-- name: find_contexts
-- Where jobs of the flows $1 have not ended, and since when the oldest of each has run: null where a clock that was ahead has
-- dated one.
SELECT flow, context, CASE WHEN max(started_at) <= clock_timestamp() THEN min(started_at) END AS since FROM ledger.job
WHERE state IN ('running', 'closed') AND flow = ANY ($1::text[])
GROUP BY flow, context;

-- name: is_leased
-- Whether a worker has a lease on leg 1 of the activity $1, or on one of its messages.
SELECT EXISTS (SELECT FROM ledger.activity WHERE id = $1 AND ledger.is_held(leased_until))
  OR EXISTS (SELECT FROM ledger.guid WHERE activity_id = $1 AND ledger.is_held(leased_until));

-- name: find_completed_job
-- What the completion tasks of the job $1 get of it.
SELECT job.id, job.flow, job.context, job.started_at, activity.request::text AS request
FROM ledger.job JOIN ledger.activity ON activity.job_id = job.id AND activity.parent_id IS NULL
WHERE job.id = $1;

-- name: find_request
-- What the activity $1 was spawned with.
SELECT request::text FROM ledger.activity WHERE id = $1;

-- name: has_begun_unasked
-- Whether leg 1 of the activity $1 is complete although it has sent no request.
SELECT ledger.is_set(ledger, 100000000000) AND NOT EXISTS (SELECT FROM ledger.request WHERE activity_id = activity.id)
FROM ledger.activity WHERE id = $1;

-- name: find_requests
-- Which activities of the flow $2 asked with the messages $1, or may be about to, and in which contexts. The first half of a
-- request's id is its activity's (`legs.id_of_request`).
SELECT request.id, activity.id AS activity, activity.name, job.context
FROM ledger.request JOIN ledger.activity ON activity.id = request.activity_id JOIN ledger.job ON job.id = activity.job_id
WHERE request.id = ANY ($1::uuid[]) AND request.flow = $2
UNION ALL
SELECT wanted.id, activity.id, activity.name, job.context
FROM unnest($1::uuid[]) AS wanted (id)
  JOIN ledger.activity ON activity.id BETWEEN (left(wanted.id::text, 18) || '-0000-000000000000')::uuid
    AND (left(wanted.id::text, 18) || '-ffff-ffffffffffff')::uuid
  JOIN ledger.job ON job.id = activity.job_id
WHERE job.flow = $2 AND NOT EXISTS (SELECT FROM ledger.request WHERE request.id = wanted.id);

-- name: find_late
-- The contexts where answers to requests of the flow $1 are overdue.
SELECT DISTINCT job.context
FROM ledger.request JOIN ledger.activity ON activity.id = request.activity_id JOIN ledger.job ON job.id = activity.job_id
WHERE request.flow = $1 AND request.due_at <= now();

-- name: find_overdue
-- The requests of the flow $1 in the context $2 whose answer is overdue, oldest first, at most $3. One that has an answer which
-- waits for a worker is not overdue. The context is looked up for each: joined, all that are overdue would be sorted.
SELECT id, activity_id AS activity, due_at FROM ledger.request
WHERE flow = $1 AND due_at <= now() AND NOT EXISTS (SELECT FROM ledger.set_aside WHERE request_id = request.id)
  AND (
    SELECT job.context FROM ledger.activity JOIN ledger.job ON job.id = activity.job_id
    WHERE activity.id = request.activity_id
  ) = $2
ORDER BY due_at LIMIT $3;

-- name: prolong
-- Gives the requests $1 all their time again where half of it is over: their answers are there, and wait for their turn.
UPDATE ledger.request SET due_at = clock_timestamp() + timeout
WHERE id = ANY ($1::uuid[]) AND due_at < clock_timestamp() + timeout / 2;

-- name: set_back
-- The clock was set back: of the requests of the flow $1 whose answers are due last, at most $2, those that have more time than
-- they were given have all of it from now on.
UPDATE ledger.request AS request SET due_at = clock_timestamp() + request.timeout
FROM (
  SELECT id FROM ledger.request WHERE flow = $1 AND due_at IS NOT NULL ORDER BY due_at DESC LIMIT $2
) AS latest
WHERE request.id = latest.id AND request.due_at > clock_timestamp() + request.timeout;

-- name: take_turn
-- Takes the turn of the activity $1 until the end of the transaction.
SELECT ledger.take_turn($1);

-- name: ask_again
-- Has the request $2 of the activity $1 go out again, under its own id, where its answer is overdue. Its verdict is
-- `exhausted` where it was asked as often as it may be, or the outbox has deleted it, and `inactive` where its answer is not
-- awaited any more.
WITH judged AS MATERIALIZED (
  SELECT request.*, job.state AS job_state, CASE
    WHEN request.due_at IS NULL OR request.due_at > clock_timestamp() THEN 'duplicate'
    WHEN job.state <> 'running' OR activity.failed_at IS NOT NULL THEN 'inactive'
    WHEN request.asked >= request.asks OR NOT postroom.emit_again(request.id) THEN 'exhausted'
    ELSE 'done'
  END AS verdict
  FROM ledger.request JOIN ledger.activity ON activity.id = request.activity_id JOIN ledger.job ON job.id = activity.job_id
  WHERE request.id = $2 AND activity.id = $1
), moved AS (
  UPDATE ledger.request SET
    asked = request.asked + CASE verdict WHEN 'done' THEN 1 ELSE 0 END,
    due_at = CASE verdict WHEN 'done' THEN clock_timestamp() + request.timeout END
  FROM judged
  WHERE request.id = judged.id AND verdict <> 'duplicate'
)
SELECT verdict, job_state AS state, asked, extract(epoch FROM timeout)::float8 AS seconds FROM judged;

-- name: set_aside
-- Keeps the message $2 of the activity $1, for leg $3, with the answer $4 to the request $5 that came as the event $6 in the
-- trace $7, since the worker $8 does not have that activity. No row: the message is done, or its job has ended permanently, or
-- does not exist.
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
