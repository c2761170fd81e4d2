-- Requests that wait for their answers. `ask_again` judges as the primitives do (primitives.sql), in turn with them.

-- name: find_requests
-- Which activities of the flow $2 asked with the messages $1.
SELECT request.id, activity.id AS activity, activity.name
FROM ledger.request JOIN ledger.activity ON activity.id = request.activity_id
WHERE request.id = ANY ($1::uuid[]) AND request.flow = $2;

-- name: find_overdue
-- The requests of the flow $1 whose answer is overdue, oldest first, at most $2. One that has an answer which waits for a
-- worker is not overdue.
SELECT id, activity_id AS activity FROM ledger.request
WHERE flow = $1 AND due_at <= now() AND NOT EXISTS (SELECT FROM ledger.set_aside WHERE request_id = request.id)
ORDER BY due_at LIMIT $2;

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
