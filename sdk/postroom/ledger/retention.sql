-- Removing jobs that ended permanently, completed or cancelled, longer ago than $1. A failed one stays: an operator may let
-- it go on. So does one that has not ended.
--
-- Each statement takes the $2 oldest, and removes up to $3 of their rows, referencing ones first, so that none takes long.

-- name: old
-- The oldest of them: what is in braces in the others.
SELECT id FROM ledger.job
WHERE state IN ('completed', 'cancelled') AND ended_at < clock_timestamp() - $1::interval ORDER BY ended_at LIMIT $2

-- name: remove_messages
-- Ledgers of messages.
WITH old AS MATERIALIZED ({old})
DELETE FROM ledger.guid WHERE (activity_id, guid) IN (
  SELECT guid.activity_id, guid.guid
  FROM old JOIN ledger.activity ON activity.job_id = old.id JOIN ledger.guid ON guid.activity_id = activity.id
  LIMIT $3
);

-- name: remove_requests
-- What activities asked for.
WITH old AS MATERIALIZED ({old})
DELETE FROM ledger.request WHERE id IN (
  SELECT request.id
  FROM old JOIN ledger.activity ON activity.job_id = old.id JOIN ledger.request ON request.activity_id = activity.id
  LIMIT $3
);

-- name: remove_activities
-- Activities without children, but for the roots.
WITH old AS MATERIALIZED ({old})
DELETE FROM ledger.activity WHERE id IN (
  SELECT activity.id
  FROM old JOIN ledger.activity ON activity.job_id = old.id
  WHERE activity.parent_id IS NOT NULL
    AND NOT EXISTS (SELECT FROM ledger.activity AS child WHERE child.parent_id = activity.id)
  LIMIT $3
);

-- name: remove_jobs
-- Jobs of which the root alone is left; their ids stay taken.
WITH old AS MATERIALIZED ({old}), removed AS (
  DELETE FROM ledger.job WHERE id IN (
    SELECT old.id FROM old
    WHERE NOT EXISTS (SELECT FROM ledger.activity WHERE job_id = old.id AND parent_id IS NOT NULL)
      AND NOT EXISTS (
        SELECT FROM ledger.activity
        WHERE job_id = old.id AND (
          EXISTS (SELECT FROM ledger.guid WHERE guid.activity_id = activity.id)
          OR EXISTS (SELECT FROM ledger.request WHERE request.activity_id = activity.id)
        )
      )
    LIMIT $3
  )
  RETURNING id, context, flow
)
INSERT INTO ledger.removed_job (id, context, flow) SELECT id, context, flow FROM removed;

-- name: has_jobs
-- Whether this database has jobs.
SELECT to_regclass('ledger.removed_job') IS NOT NULL;
