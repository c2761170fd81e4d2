-- What the benchmark of jobs prepares, counts, and compares with.

-- name: create
-- The tables that only the benchmark has.
CREATE UNLOGGED TABLE IF NOT EXISTS bench_tree (job uuid, activity uuid, request uuid);
CREATE TABLE IF NOT EXISTS bench_raw (id uuid PRIMARY KEY, step int NOT NULL);

-- name: plan
-- $1 jobs of $2 activities each, by the ids that they will have.
INSERT INTO bench_tree
SELECT job, gen_random_uuid(), gen_random_uuid()
FROM (SELECT gen_random_uuid() AS job FROM generate_series(1, $1)) AS jobs, generate_series(1, $2);

-- name: begin_jobs
-- The jobs of the mesh $1, each with so many obligations as it has activities.
INSERT INTO ledger.job (id, context, flow, semaphore)
SELECT job, $1, 'bench', count(*) FROM bench_tree GROUP BY job;

-- name: spawn
-- Their activities: the first of each job is its root.
INSERT INTO ledger.activity (id, job_id, parent_id, dimension, place, name, request)
SELECT activity, job, CASE WHEN place > 1 THEN root END, CASE WHEN place > 1 THEN 0 END, CASE WHEN place > 1 THEN place END,
  'ask', 'null'
FROM (
  SELECT *, row_number() OVER (PARTITION BY job ORDER BY activity) AS place,
    first_value(activity) OVER (PARTITION BY job ORDER BY activity) AS root
  FROM bench_tree
) AS placed
ORDER BY place;

-- name: complete_leg1
-- Each has been tried once, and has sent its request.
UPDATE ledger.activity SET ledger = 1100000000000;

-- name: ask
-- The requests; in the order of their ids, which is none, neighbours are of different jobs.
INSERT INTO ledger.request (id, activity_id, flow) SELECT request, activity, 'bench' FROM bench_tree ORDER BY request RETURNING id;

-- name: done
-- How many messages have done step 2.
SELECT count(*) FROM ledger.guid WHERE ledger.is_set(ledger, 1000000000);

-- name: raw_enter
-- A bare transaction that writes a row, as an entry does.
INSERT INTO bench_raw VALUES ($1, 0);

-- name: raw_step
-- A bare transaction that changes it, as steps 1 and 2 do together.
UPDATE bench_raw SET step = 1 WHERE id = $1;
