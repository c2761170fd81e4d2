-- Beginning a job, the calls of the primitives (migrations/0001_jobs.sql says what each does), and their leases.

-- name: start
-- Begins the job $1 of the context $2 and flow $3 with its root $4: name $5, request $6, to be closed at the threshold $7, in
-- the trace $8. No row: that job exists, or did.
SELECT * FROM ledger.start($1, $2, $3, $4, $5, $6, $7, $8);

-- name: enter_leg1
-- Counts an attempt of leg 1 of the activity $1, of at most $4, and leases it to $2 for $3.
SELECT * FROM ledger.enter_leg1($1, $2, $3, $4);

-- name: complete_leg1
-- Completes leg 1 of the activity $1, leased to $2, with the command $3 to the queue $4, payload $5, asked $7 times $6 apart.
SELECT * FROM ledger.complete_leg1($1, $2, $3, $4, $5, $6, $7);

-- name: enter_leg2
-- Enters leg 2 of the activity $1 with the message $2, for one of at most $7 attempts, or $8 of the completion where
-- it has closed the job, and leases it to $3 for $4; its content is $5, and it answers the request $6, in the trace $9.
SELECT * FROM ledger.enter_leg2($1, $2, $3, $4, $5, $6, $7, $8, $9);

-- name: spawn
-- Steps 1 and 2 for the message $2 of the activity $1, leased to $3: the children $4 (names $5, requests $6), cycles with
-- the requests $7, and the commands $8 (queues $9, payloads $10, time-outs $11, asks $12).
SELECT * FROM ledger.spawn($1, $2, $3, 'null', $4, $5, $6, $7, $8, $9, $10, $11, $12);

-- name: finish_job
-- Step 3 for the message $2 of the activity $1, leased to $3, with the result $4.
SELECT * FROM ledger.finish_job($1, $2, $3, $4);

-- name: fail
-- Fails the activity $1 and its job for the reason $2.
SELECT * FROM ledger.fail($1, $2);

-- name: renew_leg1
-- Prolongs by $3 the lease that $2 has on leg 1 of the activity $1; no row where it ran out.
UPDATE ledger.activity SET leased_until = clock_timestamp() + $3::interval
WHERE id = $1 AND owner = $2::uuid AND leased_until > clock_timestamp()
RETURNING id;

-- name: renew_leg2
-- Prolongs by $4 the lease that $3 has on the message $2 of the activity $1; no row where it ran out.
UPDATE ledger.guid SET leased_until = clock_timestamp() + $4::interval
WHERE activity_id = $1 AND guid = $2 AND owner = $3::uuid AND leased_until > clock_timestamp()
RETURNING guid;

-- name: release_leg1
-- Gives up the lease that $2 has on leg 1 of the activity $1, so that the next attempt need not wait for its end, and
-- keeps why this one failed ($3).
UPDATE ledger.activity SET owner = NULL, leased_until = NULL, last_error = $3 WHERE id = $1 AND owner = $2::uuid;

-- name: release_leg2
-- Gives up the lease that $3 has on the message $2 of the activity $1, and keeps why this attempt failed ($4).
SELECT ledger.release_leg2($1, $2, $3, $4);
