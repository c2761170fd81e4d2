-- Requests that wait for their answers. `ask_again` judges as the primitives do (primitives.sql), in turn with them.

-- name: find_requests
-- Which activities of the flow $2 asked with the messages $1. The flow is looked up for each: joined, Postgres may begin with
-- all jobs of a flow, and everything that they ever sent.
WITH named AS MATERIALIZED (
  SELECT id, activity_id FROM ledger.request WHERE id = ANY ($1::uuid[])
)
SELECT named.id, activity.id AS activity, activity.name
FROM named JOIN ledger.activity ON activity.id = named.activity_id
WHERE (SELECT flow FROM ledger.job WHERE id = activity.job_id) = $2;

-- name: find_overdue
-- The requests of the flows $1 whose answer is overdue, oldest first, at most $2. The flow is looked up as above. One
-- that has an answer which waits for a worker is not overdue.
WITH overdue AS MATERIALIZED (
  SELECT id, activity_id, due_at FROM ledger.request
  WHERE due_at <= now() AND NOT EXISTS (SELECT FROM ledger.set_aside WHERE request_id = request.id)
)
SELECT overdue.id, overdue.activity_id AS activity
FROM overdue JOIN ledger.activity ON activity.id = overdue.activity_id
WHERE (SELECT flow FROM ledger.job WHERE id = activity.job_id) = ANY ($1::text[])
ORDER BY overdue.due_at LIMIT $2;

-- name: take_turn
-- Takes the turn of the activity $1 until the end of the transaction.
SELECT ledger.take_turn($1);

-- name: ask_again
-- Has the request $2 of the activity $1 go out again, under its own id, where its answer is overdue. Its verdict is
-- `exhausted` where it was asked as often as it may be, or the outbox has it no more, and `inactive` where nobody waits.
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
