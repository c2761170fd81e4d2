-- The primitives of the ledgers. Each is one statement that judges first, and changes something only when its verdict is
-- `done`; the verdict and what the caller needs are its only row. No row: there is no such activity, or message of it.
--
--     weight             activity            GUID
--     1000000000000      attempt of leg 1
--      100000000000      leg 1 complete      snapshot: this message closed the job
--       10000000000      step 1, work done
--        1000000000      step 2, children spawned
--         100000000      step 3, completion tasks done
--                 1      entry into leg 2    ordinal, never moved
--
-- `lock_activity` goes before each in its transaction, so that it sees what the one before it did. The job's row, which
-- all activities of a job share, is locked last and once, by its UPDATE, which judges it again: locked first and updated
-- then, two of these statements can wait for each other. A transaction that has concluded a step is ended by Postgres
-- where its worker stands still: it would hold these rows.

-- name: start
-- Begins the job $1 of the context $2 and flow $3 with its root $4: name $5, request $6. No row: there is that job.
WITH job AS (
  INSERT INTO ledger.job (id, context, flow) VALUES ($1, $2, $3) ON CONFLICT (id) DO NOTHING RETURNING id, context, flow
), root AS (
  INSERT INTO ledger.activity (id, job_id, name, request)
  SELECT $4, id, $5, $6::jsonb FROM job RETURNING id, job_id, name
)
SELECT
  postroom.emit(job.context, 'job', job.id::text, 'job_started',
    jsonb_build_object('job', job.id, 'flow', job.flow), correlation_id => job.id),
  postroom.emit(job.context, 'activity', root.id::text, 'activity_spawned',
    jsonb_build_object('job', job.id, 'activity', root.id, 'flow', job.flow, 'name', root.name), correlation_id => job.id)
FROM job, root;

-- name: lock_activity
-- Takes the lock that entries and steps of the activity $1 take turns with.
SELECT FROM ledger.activity WHERE id = $1 FOR NO KEY UPDATE;

-- name: enter_leg1
-- Counts an attempt of leg 1 of the activity $1 and leases it to $2 for $3. A replay is counted too, and leases nothing.
WITH judged AS MATERIALIZED (
  SELECT activity.*, job.state, job.context, CASE
    WHEN state <> 'running' OR failed_at IS NOT NULL THEN 'inactive'
    WHEN leased_until > clock_timestamp() THEN 'held'
    WHEN ledger / 1000000000000 >= 999 THEN 'overflow'
    WHEN ledger.is_set(ledger, 100000000000) THEN 'duplicate'
    ELSE 'done'
  END AS verdict
  FROM ledger.activity JOIN ledger.job ON job.id = activity.job_id
  WHERE activity.id = $1
), counted AS (
  UPDATE ledger.activity SET
    ledger = activity.ledger + 1000000000000,
    owner = CASE WHEN verdict = 'done' THEN $2::uuid END,
    leased_until = CASE WHEN verdict = 'done' THEN clock_timestamp() + $3::interval END
  FROM judged
  WHERE activity.id = judged.id AND verdict IN ('done', 'duplicate')
  RETURNING activity.ledger
)
SELECT verdict, state, coalesce(counted.ledger, judged.ledger) AS ledger, job_id, name, request::text AS request,
  context, last_error, extract(epoch FROM leased_until - clock_timestamp())::float8 AS seconds
FROM judged LEFT JOIN counted ON true;

-- name: complete_leg1
-- Completes leg 1 of the activity $1, leased to $2, and puts its request, where it has one, into the outbox: the command
-- with the id $3 to the queue $4 with payload $5, which is asked $7 times, $6 apart. An activity without has none.
WITH judged AS MATERIALIZED (
  SELECT activity.*, job.state, job.context, CASE
    WHEN state <> 'running' OR failed_at IS NOT NULL THEN 'inactive'
    WHEN ledger.is_set(ledger, 100000000000) THEN 'duplicate'
    WHEN (owner = $2::uuid AND leased_until > clock_timestamp()) IS NOT TRUE THEN 'lease_lost'
    ELSE 'done'
  END AS verdict
  FROM ledger.activity JOIN ledger.job ON job.id = activity.job_id
  WHERE activity.id = $1
), completed AS (
  UPDATE ledger.activity SET
    ledger = activity.ledger + 100000000000, owner = NULL, leased_until = NULL, last_error = NULL
  FROM judged
  WHERE activity.id = judged.id AND verdict = 'done'
  RETURNING activity.id, activity.job_id, activity.ledger
), asked AS (
  INSERT INTO ledger.request (id, activity_id, timeout, asks, due_at)
  SELECT $3::uuid, completed.id, $6::interval, $7::integer, clock_timestamp() + $6::interval
  FROM completed
  WHERE $3::uuid IS NOT NULL
  RETURNING id
), emitted AS (
  SELECT postroom.emit_command(judged.context, $4, $5::jsonb, 'activity', completed.id::text,
    correlation_id => completed.job_id, id => asked.id)
  FROM completed, judged, asked
)
SELECT verdict, state, coalesce(completed.ledger, judged.ledger) AS ledger, (SELECT count(*) FROM emitted) AS emitted,
  set_config('idle_in_transaction_session_timeout', '10s', true) AS most_idle
FROM judged LEFT JOIN completed ON true;

-- name: enter_leg2
-- Enters leg 2 of the activity $1 with the message $2, and leases the message to $3 for $4. A message
-- that is new takes an answer that is due, that to the request $6 where it names one, and the ordinal of its guid; what it
-- says ($5) is kept, also of one that is refused because its job has failed: a retry of the job brings it back.
WITH known AS MATERIALIZED (
  SELECT * FROM ledger.guid WHERE activity_id = $1 AND guid = $2
), judged AS MATERIALIZED (
  SELECT activity.*, job.state, job.context, known.ledger AS known, known.answer, known.result,
    known.last_error AS known_error, known.leased_until AS held_until, CASE
    WHEN ledger.is_set(known.ledger, 1000000000)
      AND (ledger.is_set(known.ledger, 100000000) OR NOT ledger.is_set(known.ledger, 100000000000)) THEN 'duplicate'
    WHEN activity.failed_at IS NOT NULL THEN 'inactive'
    WHEN job.state <> 'running'
      AND (job.state = 'closed' AND ledger.is_set(known.ledger, 100000000000)) IS NOT TRUE THEN 'inactive'
    WHEN NOT ledger.is_set(activity.ledger, 100000000000) THEN 'forbidden'
    WHEN known.leased_until > clock_timestamp() THEN 'held'
    WHEN known.ledger IS NULL AND activity.answers_taken >= activity.answers_due THEN 'duplicate'
    WHEN known.ledger IS NULL AND EXISTS (
      SELECT FROM ledger.request WHERE id = $6::uuid AND answered_by IS NOT NULL
    ) THEN 'duplicate'
    WHEN activity.ledger % 100000000 >= 99999999 THEN 'overflow'
    ELSE 'done'
  END AS verdict
  FROM ledger.activity JOIN ledger.job ON job.id = activity.job_id LEFT JOIN known ON true
  WHERE activity.id = $1
), counted AS (
  UPDATE ledger.activity SET
    ledger = activity.ledger + 1,
    answers_taken = activity.answers_taken + CASE WHEN judged.known IS NULL THEN 1 ELSE 0 END
  FROM judged
  WHERE activity.id = judged.id AND verdict = 'done'
  RETURNING activity.id, activity.job_id, activity.ledger
), seeded AS (
  INSERT INTO ledger.guid (activity_id, guid, job_id, ledger, answer, owner, leased_until)
  SELECT counted.id, $2, counted.job_id, counted.ledger % 100000000, $5::jsonb, $3::uuid,
    clock_timestamp() + $4::interval
  FROM counted, judged
  WHERE judged.known IS NULL
  RETURNING ledger, attempts
), taken AS (
  UPDATE ledger.guid SET
    attempts = guid.attempts + 1, owner = $3::uuid, leased_until = clock_timestamp() + $4::interval
  FROM counted
  WHERE guid.activity_id = counted.id AND guid.guid = $2 AND EXISTS (SELECT FROM judged WHERE judged.known IS NOT NULL)
  RETURNING guid.ledger, guid.attempts
), answered AS (
  UPDATE ledger.request SET answered_by = $2, due_at = NULL
  FROM counted, judged
  WHERE request.id = $6::uuid AND request.activity_id = counted.id AND judged.known IS NULL
), missed AS (
  INSERT INTO ledger.missed (activity_id, guid, answer, request_id)
  SELECT id, $2, $5::jsonb, $6::uuid FROM judged
  WHERE verdict = 'inactive' AND state = 'failed' AND judged.known IS NULL
  ON CONFLICT DO NOTHING
), entered AS (
  SELECT * FROM seeded UNION ALL SELECT * FROM taken
)
SELECT verdict, state, judged.job_id, judged.context, judged.name, judged.request::text AS request,
  judged.result::text AS result, judged.known_error AS last_error,
  coalesce(counted.ledger, judged.ledger) AS activity_ledger, coalesce(entered.ledger, judged.known) AS ledger,
  entered.attempts AS attempt, extract(epoch FROM held_until - clock_timestamp())::float8 AS seconds
FROM judged LEFT JOIN counted ON true LEFT JOIN entered ON true;

-- name: finish_work
-- Step 1: marks the work of the message $2 of the activity $1, leased to $3, as done, with its result $4.
WITH judged AS MATERIALIZED (
  SELECT guid.*, job.state, CASE
    WHEN job.state <> 'running' OR activity.failed_at IS NOT NULL THEN 'inactive'
    WHEN (guid.owner = $3::uuid AND guid.leased_until > clock_timestamp()) IS NOT TRUE THEN 'lease_lost'
    WHEN ledger.is_set(guid.ledger, 10000000000) THEN 'duplicate'
    ELSE 'done'
  END AS verdict
  FROM ledger.guid JOIN ledger.activity ON activity.id = guid.activity_id JOIN ledger.job ON job.id = guid.job_id
  WHERE guid.activity_id = $1 AND guid.guid = $2
), marked AS (
  UPDATE ledger.guid SET ledger = guid.ledger + 10000000000, result = $4::jsonb
  FROM judged
  WHERE guid.activity_id = judged.activity_id AND guid.guid = judged.guid AND verdict = 'done'
  RETURNING guid.activity_id, guid.ledger
), noted AS (
  UPDATE ledger.activity SET ledger = activity.ledger + 10000000000
  FROM marked
  WHERE activity.id = marked.activity_id AND NOT ledger.is_set(activity.ledger, 10000000000)
)
SELECT verdict, state, coalesce(marked.ledger, judged.ledger) AS ledger,
  set_config('idle_in_transaction_session_timeout', '10s', true) AS most_idle
FROM judged LEFT JOIN marked ON true;

-- name: spawn
-- Step 2, the compound primitive, for the message $2 of the activity $1, leased to $3: inserts the children $4 (names $5,
-- requests $6), has the activity entered again for each request of $7, and for the answer to each command of $8 (queues
-- $9, payloads $10, time-outs $11, how often each is asked $12), moves the semaphore by their number less one, sets both
-- markers, and, where it reached 0, closes the job and says so in this message's ledger. What is spawned goes out through
-- the outbox; of an entry that is due again, the event's id is the next message's.
WITH judged AS MATERIALIZED (
  SELECT guid.*, job.state, job.context, job.flow, activity.name,
    cardinality($4::uuid[]) + cardinality($7::text[]) + cardinality($8::uuid[]) - 1 AS delta,
    CASE
      WHEN job.state <> 'running' OR activity.failed_at IS NOT NULL THEN 'inactive'
      WHEN (guid.owner = $3::uuid AND guid.leased_until > clock_timestamp()) IS NOT TRUE THEN 'lease_lost'
      WHEN NOT ledger.is_set(guid.ledger, 10000000000) THEN 'forbidden'
      WHEN ledger.is_set(guid.ledger, 1000000000) THEN 'duplicate'
      ELSE 'done'
    END AS verdict
  FROM ledger.guid JOIN ledger.activity ON activity.id = guid.activity_id JOIN ledger.job ON job.id = guid.job_id
  WHERE guid.activity_id = $1 AND guid.guid = $2
), moved AS (
  UPDATE ledger.job SET
    semaphore = job.semaphore + delta,
    state = CASE WHEN job.semaphore + delta = 0 THEN 'closed' ELSE job.state END
  FROM judged
  WHERE job.id = judged.job_id AND verdict = 'done' AND job.state = 'running'
  RETURNING job.id, job.semaphore, CASE WHEN job.semaphore = 0 THEN 1 ELSE 0 END AS threshold_hit
), marked AS (
  UPDATE ledger.guid SET
    ledger = guid.ledger + 1000000000 + threshold_hit * 100000000000,
    last_error = NULL,
    owner = CASE threshold_hit WHEN 1 THEN guid.owner END,
    leased_until = CASE threshold_hit WHEN 1 THEN guid.leased_until END
  FROM judged, moved
  WHERE guid.activity_id = judged.activity_id AND guid.guid = judged.guid
  RETURNING guid.activity_id, guid.ledger
), noted AS (
  UPDATE ledger.activity SET
    ledger = activity.ledger + CASE WHEN ledger.is_set(activity.ledger, 1000000000) THEN 0 ELSE 1000000000 END,
    answers_due = activity.answers_due + cardinality($7::text[]) + cardinality($8::uuid[])
  FROM marked
  WHERE activity.id = marked.activity_id
), children AS (
  INSERT INTO ledger.activity (id, job_id, parent_id, dimension, place, name, request)
  SELECT child.id, judged.job_id, judged.activity_id, judged.ledger % 100000000 - 1, child.place, child.name,
    child.request::jsonb
  FROM moved, judged, unnest($4::uuid[], $5::text[], $6::text[]) WITH ORDINALITY AS child (id, name, request, place)
  RETURNING id, job_id, name
), asked AS (
  INSERT INTO ledger.request (id, activity_id, timeout, asks, due_at)
  SELECT ask.id, judged.activity_id, ask.timeout, ask.asks, clock_timestamp() + ask.timeout
  FROM moved, judged, unnest($8::uuid[], $11::interval[], $12::integer[]) AS ask (id, timeout, asks)
  RETURNING id
), emitted AS (
  SELECT postroom.emit(judged.context, 'activity', children.id::text, 'activity_spawned',
    jsonb_build_object('job', judged.job_id, 'activity', children.id, 'flow', judged.flow, 'name', children.name),
    correlation_id => judged.job_id)
  FROM judged, children
  UNION ALL
  SELECT postroom.emit(judged.context, 'activity', judged.activity_id::text, 'activity_cycled',
    jsonb_build_object('job', judged.job_id, 'activity', judged.activity_id, 'flow', judged.flow, 'name', judged.name,
      'request', again.request::jsonb),
    correlation_id => judged.job_id)
  FROM moved, judged, unnest($7::text[]) AS again (request)
  UNION ALL
  SELECT postroom.emit_command(judged.context, ask.queue, ask.payload::jsonb, 'activity', judged.activity_id::text,
    correlation_id => judged.job_id, id => asked.id)
  FROM judged, asked JOIN unnest($8::uuid[], $9::text[], $10::text[]) AS ask (id, queue, payload) USING (id)
)
SELECT CASE WHEN verdict = 'done' AND moved.id IS NULL THEN 'inactive' ELSE verdict END AS verdict,
  state, coalesce(marked.ledger, judged.ledger) AS ledger, threshold_hit, semaphore,
  (SELECT count(*) FROM emitted) AS emitted,
  set_config('idle_in_transaction_session_timeout', '10s', true) AS most_idle
FROM judged LEFT JOIN marked ON true LEFT JOIN moved ON true;

-- name: finish_job
-- Step 3: marks the completion tasks as done by the message $2 of the activity $1, leased to $3, which closed the job;
-- the job is completed with the result $4.
WITH judged AS MATERIALIZED (
  SELECT guid.*, job.state, job.context, job.flow, CASE
    WHEN job.state IN ('completed', 'failed', 'cancelled') THEN 'inactive'
    WHEN (guid.owner = $3::uuid AND guid.leased_until > clock_timestamp()) IS NOT TRUE THEN 'lease_lost'
    WHEN NOT ledger.is_set(guid.ledger, 100000000000) THEN 'forbidden'
    ELSE 'done'
  END AS verdict
  FROM ledger.guid JOIN ledger.job ON job.id = guid.job_id
  WHERE guid.activity_id = $1 AND guid.guid = $2
), completed AS (
  UPDATE ledger.job SET state = 'completed', ended_at = clock_timestamp()
  FROM judged
  WHERE job.id = judged.job_id AND verdict = 'done' AND job.state = 'closed'
  RETURNING job.id
), marked AS (
  UPDATE ledger.guid SET ledger = guid.ledger + 100000000, owner = NULL, leased_until = NULL
  FROM judged, completed
  WHERE guid.activity_id = judged.activity_id AND guid.guid = judged.guid
  RETURNING guid.activity_id, guid.ledger
), noted AS (
  UPDATE ledger.activity SET ledger = activity.ledger + 100000000
  FROM marked
  WHERE activity.id = marked.activity_id AND NOT ledger.is_set(activity.ledger, 100000000)
), emitted AS (
  SELECT postroom.emit(judged.context, 'job', completed.id::text, 'job_completed',
    jsonb_build_object('job', completed.id, 'flow', judged.flow, 'result', $4::jsonb), correlation_id => completed.id)
  FROM judged, completed
)
SELECT CASE WHEN verdict = 'done' AND marked.ledger IS NULL THEN 'inactive' ELSE verdict END AS verdict,
  state, coalesce(marked.ledger, judged.ledger) AS ledger, (SELECT count(*) FROM emitted) AS emitted,
  set_config('idle_in_transaction_session_timeout', '10s', true) AS most_idle
FROM judged LEFT JOIN marked ON true;

-- name: fail
-- Fails the activity $1 and its job, and says why ($2); no ledger moves.
WITH judged AS MATERIALIZED (
  SELECT job.*, activity.id AS activity_id, activity.name, activity.ledger
  FROM ledger.activity JOIN ledger.job ON job.id = activity.job_id
  WHERE activity.id = $1
), ended AS (
  UPDATE ledger.job SET state = 'failed', ended_at = clock_timestamp(), error = $2
  FROM judged
  WHERE job.id = judged.id AND job.state IN ('running', 'closed')
  RETURNING job.id
), failed AS (
  UPDATE ledger.activity SET failed_at = clock_timestamp(), error = $2, owner = NULL, leased_until = NULL
  FROM judged, ended
  WHERE activity.id = judged.activity_id
), emitted AS (
  SELECT postroom.emit(judged.context, 'job', ended.id::text, 'job_failed',
    jsonb_build_object('job', ended.id, 'flow', judged.flow, 'activity', judged.activity_id, 'name', judged.name,
      'ledger', lpad(judged.ledger::text, 15, '0'), 'error', $2::text),
    correlation_id => ended.id)
  FROM judged, ended
)
SELECT CASE WHEN ended.id IS NULL THEN 'inactive' ELSE 'done' END AS verdict, state,
  (SELECT count(*) FROM emitted) AS emitted
FROM judged LEFT JOIN ended ON true;

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
UPDATE ledger.guid SET owner = NULL, leased_until = NULL, last_error = $4
WHERE activity_id = $1 AND guid = $2 AND owner = $3::uuid;
