-- The calls of the ledgers' functions by a write that is a job (docs/contract/spark.md#spark-11).

-- name: knows_mesh
-- Whether there is the mesh $1.
SELECT EXISTS (SELECT FROM mesh.mesh WHERE slug = $1);

-- name: find_job
-- Which flow the job $1 is of, its state, and its root.
SELECT job.flow, job.state, activity.id AS root
FROM ledger.job JOIN ledger.activity ON activity.job_id = job.id AND activity.parent_id IS NULL
WHERE job.id = $1;

-- name: start
-- Begins the job $1 of the mesh $2 and the flow $3 with its root $4: name $5, request $6. No row: there is that job.
SELECT FROM ledger.start($1, $2, $3, $4, $5, $6);

-- name: enter_leg1
-- Counts an attempt of leg 1 of the activity $1, as often as its ledger can, and leases it to $2 for $3.
SELECT verdict, state FROM ledger.enter_leg1($1, $2, $3, 1000);

-- name: complete_leg1
-- Completes leg 1 of the activity $1, leased to $2; it sends nothing.
SELECT verdict, state FROM ledger.complete_leg1($1, $2, NULL, NULL, NULL, NULL, NULL);

-- name: enter_leg2
-- Enters leg 2 of the activity $1 with the message $2, as often as its ledger can, and leases it to $3 for $4.
SELECT verdict, state, result, ledger.is_set(ledger, 1000000000) AS spawned
FROM ledger.enter_leg2($1, $2, $3, $4, 'null', NULL, 100000000);

-- name: spawn
-- Steps 1 and 2 for the message $2 of the activity $1, leased to $3, with the result $4: the children $5 (names $6, requests
-- $7), which go out as `activity_spawned`.
SELECT verdict, state, threshold_hit
FROM ledger.spawn($1, $2, $3, $4, $5, $6, $7, '{}', '{}', '{}', '{}', '{}', '{}');

-- name: finish_job
-- Step 3, by the message $2 of the activity $1, leased to $3, which closed the job: it is completed with the result $4.
SELECT verdict, state FROM ledger.finish_job($1, $2, $3, $4);

-- name: fail
-- Fails the activity $1 and its job, for the reason $2: `job_failed` goes out.
SELECT ledger.fail($1, $2);

-- name: release_leg2
-- Gives up the lease that $3 has on the message $2 of the activity $1, and keeps why this attempt failed ($4).
SELECT ledger.release_leg2($1, $2, $3, $4);
