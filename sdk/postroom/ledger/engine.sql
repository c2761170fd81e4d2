-- What the engine asks of jobs beside its steps.

-- name: find_contexts
-- Where jobs of the flows $1 have not ended, and since when the oldest of each has run.
SELECT flow, context, min(started_at) AS since FROM ledger.job
WHERE state IN ('running', 'closed') AND flow = ANY ($1::text[])
GROUP BY flow, context;

-- name: is_leased
-- Whether a worker has a lease on leg 1 of the activity $1, or on one of its messages.
SELECT EXISTS (SELECT FROM ledger.activity WHERE id = $1 AND leased_until > clock_timestamp())
  OR EXISTS (SELECT FROM ledger.guid WHERE activity_id = $1 AND leased_until > clock_timestamp());

-- name: find_completed_job
-- What the completion tasks of the job $1 are told about it.
SELECT job.id, job.flow, job.context, job.started_at, activity.request::text AS request
FROM ledger.job JOIN ledger.activity ON activity.job_id = job.id AND activity.parent_id IS NULL
WHERE job.id = $1;

-- name: find_request
-- What the activity $1 was spawned with.
SELECT request::text FROM ledger.activity WHERE id = $1;
