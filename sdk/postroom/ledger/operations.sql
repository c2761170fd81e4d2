-- What an operator sees of jobs and does to them (docs/contract/jobs.md#jobs-30).
--
-- A verb that ends a job or lets it go on holds all its activities first, and with them every entry and step.

-- name: find_jobs
-- The newest $4 jobs of the context $1, the flow $2 and the state $3, after the job $6 that was started at $5, of those with
-- the ids $7, started more than $8 seconds ago and before the time $9, each of which may be null; of each that has not ended
-- also the activities that wait for a worker which has them.
SELECT id, context AS mesh, flow, state, semaphore AS open, started_at, ended_at, error,
  CASE WHEN state IN ('running', 'closed') THEN ARRAY(
  SELECT DISTINCT activity.name
  FROM ledger.set_aside JOIN ledger.activity ON activity.id = set_aside.activity_id
  WHERE activity.job_id = job.id
  ORDER BY activity.name
) ELSE '{}' END AS unknown
FROM ledger.job
WHERE ($1::text IS NULL OR context = $1) AND ($2::text IS NULL OR flow = $2) AND ($3::text IS NULL OR state = $3)
  AND ($5::timestamptz IS NULL OR (started_at, id) < ($5, $6::uuid)) AND ($7::uuid[] IS NULL OR id = ANY ($7))
  AND coalesce(started_at < least(now() - $8::float8 * interval '1 second', $9::timestamptz), true)
ORDER BY started_at DESC, id DESC
LIMIT $4;

-- name: count_jobs
-- How many jobs of each flow have not ended, how many have failed, and how many steps wait for a worker that has their
-- activity.
SELECT
  (SELECT coalesce(jsonb_object_agg(flow, jobs), '{}')::text
    FROM (SELECT flow, count(*) AS jobs FROM ledger.job WHERE state IN ('running', 'closed') GROUP BY flow) AS each
  ) AS flows,
  (SELECT count(*) FROM ledger.job WHERE state = 'failed') AS failed,
  (SELECT count(DISTINCT activity.id)
    FROM ledger.set_aside JOIN ledger.activity ON activity.id = set_aside.activity_id
      JOIN ledger.job ON job.id = activity.job_id
    WHERE job.state IN ('running', 'closed')) AS unknown;

-- name: find_job
-- The job $1, as in `find_jobs` but without the activities that wait.
SELECT id, context AS mesh, flow, state, semaphore AS open, started_at, ended_at, error FROM ledger.job WHERE id = $1;

-- name: find_start
-- What the job $1 was started with, where there is one.
SELECT job.context, job.flow, activity.name, activity.request = $2::jsonb AS same_request
FROM ledger.job JOIN ledger.activity ON activity.job_id = job.id AND activity.parent_id IS NULL
WHERE job.id = $1;

-- name: find_removed
-- The context and the flow of the removed job $1.
SELECT context, flow FROM ledger.removed_job WHERE id = $1;

-- name: find_activities
-- The activities of the job $1, children in the order in which they were spawned, with how far the messages of each are,
-- and the last worker that took one without having the activity.
SELECT activity.id, activity.parent_id, activity.dimension, activity.name, activity.request::text AS request,
  activity.spawned_at, activity.ledger,
  activity.answers_due, activity.answers_taken, activity.failed_at,
  coalesce(activity.error, activity.last_error, messages.last_error, (
    SELECT 'its request is not published: ' || event.publish_error
    FROM ledger.request JOIN postroom.outbox_events AS event ON event.id = request.id
    WHERE request.activity_id = activity.id AND event.published_at IS NULL AND event.publish_error IS NOT NULL
    LIMIT 1
  )) AS error,
  messages.undone, messages.closing, messages.deliveries, (
    SELECT worker FROM ledger.set_aside WHERE activity_id = activity.id ORDER BY at DESC LIMIT 1
  ) AS worker_without
FROM ledger.activity, LATERAL (
  SELECT count(*) FILTER (WHERE NOT ledger.is_set(guid.ledger, 1000000000)) AS undone,
    coalesce(
      bool_or(ledger.is_set(guid.ledger, 100000000000) AND NOT ledger.is_set(guid.ledger, 100000000)), false
    ) AS closing,
    coalesce(max(guid.attempts), 0) AS deliveries,
    max(guid.last_error) AS last_error
  FROM ledger.guid
  WHERE guid.activity_id = activity.id
) AS messages
WHERE activity.job_id = $1
ORDER BY activity.dimension NULLS FIRST, activity.place, activity.id;

-- name: find_log
-- What operators did to the job $1, in order.
SELECT at, verb, actor, reason FROM ledger.operator_log WHERE job_id = $1 ORDER BY id;

-- name: hold_activities
-- Holds the activities of the job $1 until the end of the transaction, root first, and counts them.
SELECT count(*) FROM (
  SELECT FROM ledger.activity WHERE job_id = $1 ORDER BY parent_id NULLS FIRST, id FOR NO KEY UPDATE
) AS held;

-- name: cancel
-- Ends the job $1 permanently, by $2 for the reason $3, where that has not been done; no row: there is no such job.
WITH ended AS (
  UPDATE ledger.job SET state = 'cancelled', ended_at = clock_timestamp(), error = $3
  WHERE id = $1 AND state IN ('running', 'closed', 'failed')
  RETURNING *
), logged AS (
  INSERT INTO ledger.operator_log (job_id, verb, actor, reason) SELECT id, 'cancel', $2, $3 FROM ended
), emitted AS (
  SELECT postroom.emit(context, 'job', id::text, 'job_cancelled',
    jsonb_build_object('job', id, 'flow', flow, 'by', $2::text, 'reason', $3::text), correlation_id => id)
  FROM ended
)
SELECT job.state, ended.id IS NOT NULL AS done, (SELECT count(*) FROM emitted) AS emitted
FROM ledger.job LEFT JOIN ended ON true
WHERE job.id = $1;

-- name: find_failed
-- The ledger of the activity that failed the job $1.
SELECT ledger FROM ledger.activity WHERE job_id = $1 AND failed_at IS NOT NULL;

-- name: find_pruned
-- A request that the activity that failed the job $1 has no answer to, and that the outbox has deleted.
SELECT request.id, activity.name
FROM ledger.activity JOIN ledger.request ON request.activity_id = activity.id
WHERE activity.job_id = $1 AND activity.failed_at IS NOT NULL AND request.answered_by IS NULL
  AND NOT EXISTS (SELECT FROM postroom.outbox_events WHERE id = request.id)
LIMIT 1;

-- name: retry
-- Lets the failed job $1 go on, by $2 for the reason $3; no row: there is no such job. The messages that were refused go out
-- again: those that began an activity whose leg 1 is not complete, or that answers itself and has not; each message that is
-- not done, or was missed meanwhile; and the requests without an answer that are the failed activity's, or overdue. Each goes
-- under its own id, so that a copy of it that is still under way is recognised, and what is done is known by its ledger.
WITH revived AS (
  UPDATE ledger.job SET
    state = CASE WHEN EXISTS (SELECT FROM ledger.guid WHERE job_id = $1 AND ledger.is_set(ledger, 100000000000))
      THEN 'closed' ELSE 'running' END,
    ended_at = NULL, error = NULL
  WHERE id = $1 AND state = 'failed'
  RETURNING *
), logged AS (
  INSERT INTO ledger.operator_log (job_id, verb, actor, reason) SELECT id, 'retry', $2, $3 FROM revived
), activities AS MATERIALIZED (
  SELECT activity.* FROM ledger.activity JOIN revived ON activity.job_id = revived.id
), cleared AS (
  UPDATE ledger.activity SET
    failed_at = NULL, error = NULL, owner = NULL, leased_until = NULL, attempts_before = activity.ledger / 1000000000000
  FROM activities
  WHERE activity.id = activities.id
    AND (num_nonnulls(activity.failed_at, activity.owner) > 0 OR NOT ledger.is_set(activity.ledger, 100000000000))
), freed AS (
  UPDATE ledger.guid SET owner = NULL, leased_until = NULL, attempts_before = guid.attempts
  FROM activities
  WHERE guid.activity_id = activities.id AND (NOT ledger.is_set(guid.ledger, 1000000000)
    OR (ledger.is_set(guid.ledger, 100000000000) AND NOT ledger.is_set(guid.ledger, 100000000)))
), unanswered AS MATERIALIZED (
  SELECT request.id, activities.failed_at IS NOT NULL
    OR (request.timeout IS NOT NULL AND (request.due_at > now()) IS NOT TRUE) AS overdue
  FROM ledger.request JOIN activities ON activities.id = request.activity_id
  WHERE request.answered_by IS NULL
), asked AS (
  UPDATE ledger.request SET due_at = clock_timestamp() + request.timeout, asked = 1
  FROM unanswered
  WHERE request.id = unanswered.id
), missed AS (
  DELETE FROM ledger.missed USING activities
  WHERE missed.activity_id = activities.id
  RETURNING missed.activity_id, missed.guid, missed.answer, missed.request_id, missed.traceparent, missed.arrival
), messages AS (
  SELECT activity_id, guid, answer, NULL::uuid AS request_id, guid.traceparent, 0 AS arrival
  FROM ledger.guid JOIN activities ON activities.id = guid.activity_id
  WHERE NOT ledger.is_set(guid.ledger, 1000000000)
    OR (ledger.is_set(guid.ledger, 100000000000) AND NOT ledger.is_set(guid.ledger, 100000000))
  UNION ALL
  SELECT * FROM missed
), begun AS (
  SELECT activities.id, activities.name, activities.traceparent, event.id AS event
  FROM activities LEFT JOIN postroom.outbox_events AS event
    ON event.correlation_id = $1 AND event.event_type = 'activity_spawned' AND event.aggregate_id = activities.id::text
  WHERE NOT ledger.is_set(activities.ledger, 100000000000)
    OR (activities.answers_taken = 0
      AND NOT EXISTS (SELECT FROM ledger.request WHERE request.activity_id = activities.id)
      AND NOT EXISTS (SELECT FROM missed WHERE missed.activity_id = activities.id))
), emitted AS (
  SELECT postroom.emit(context, 'job', id::text, 'job_retried',
    jsonb_build_object('job', id, 'flow', flow, 'by', $2::text, 'reason', $3::text), correlation_id => id)
  FROM revived
  UNION ALL
  SELECT postroom.emit(context, 'activity', begun.id::text, 'activity_spawned',
    jsonb_build_object('job', revived.id, 'activity', begun.id, 'flow', flow, 'name', name),
    correlation_id => revived.id, traceparent => begun.traceparent)
  FROM revived, begun
  WHERE event IS NULL
  UNION ALL
  (SELECT postroom.emit(context, 'activity', activities.id::text, 'activity_retried',
    jsonb_build_object('job', revived.id, 'activity', activities.id, 'flow', flow, 'name', name,
      'guid', guid, 'answer', answer, 'request', request_id),
    correlation_id => revived.id, traceparent => coalesce(messages.traceparent, activities.traceparent))
  FROM revived, activities JOIN messages ON messages.activity_id = activities.id ORDER BY arrival)
), emitted_again AS (
  SELECT postroom.emit_again(id) FROM unanswered WHERE overdue
  UNION ALL
  SELECT postroom.emit_again(event) FROM begun WHERE event IS NOT NULL
)
SELECT job.state, revived.id IS NOT NULL AS done,
  (SELECT count(*) FROM emitted) + (SELECT count(*) FROM emitted_again) AS emitted
FROM ledger.job LEFT JOIN revived ON true
WHERE job.id = $1;

-- name: find_message
-- The roles of the message $1 for activities; $2 is the same as a UUID, or null where it is not one. `what` is `answer` where
-- leg 2 runs for it, `set_aside` and `missed` where it waits to come again, `request` where it asks, `event` where it moves
-- an activity on, and `activity` where it is an activity and not a message.
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
