-- Each takes its turn with the others of its activity, and then is one statement, which so sees what the one before it did.
-- It judges first, and changes something only when its verdict is `done`; the verdict and what the caller needs are its
-- only row. No row: there is no such activity, or message of it. A call is one round trip and, outside of a transaction,
-- one commit.
--
--     weight             activity            GUID
--     1000000000000      attempt of leg 1
--      100000000000      leg 1 complete      snapshot: this message closed the job
--       10000000000      step 1, work done
--        1000000000      step 2, children spawned
--         100000000      step 3, completion tasks done
--                 1      entry into leg 2    ordinal, never moved
--
-- The job's row, which all activities of a job share, is locked last and once, by its UPDATE, which judges it again: locked
-- first and updated then, two of these statements can wait for each other.

-- Begins a job of a context and a flow with its root, to be closed at a threshold. No row: there is that job, or there was
-- one with this id. (One that is being removed just now is waited for, and then the statement after it sees that.)
CREATE FUNCTION ledger.start(
  job uuid, context text, flow text, root uuid, name text, request jsonb, threshold integer DEFAULT 0,
  traceparent text DEFAULT NULL
) RETURNS TABLE (job_started uuid, activity_spawned uuid) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  INSERT INTO ledger.job (id, context, flow, threshold)
  VALUES (start.job, start.context, start.flow, start.threshold)
  ON CONFLICT (id) DO NOTHING;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  DELETE FROM ledger.job USING ledger.removed_job WHERE job.id = start.job AND removed_job.id = job.id;
  RETURN QUERY
  WITH job AS (
    SELECT id, context, flow FROM ledger.job WHERE id = start.job
  ), root AS (
    INSERT INTO ledger.activity (id, job_id, name, request, traceparent)
    SELECT start.root, job.id, start.name, start.request, start.traceparent FROM job
    RETURNING id, job_id, name
  )
  SELECT
    postroom.emit(job.context, 'job', job.id::text, 'job_started',
      jsonb_build_object('job', job.id, 'flow', job.flow), correlation_id => job.id,
      traceparent => start.traceparent),
    postroom.emit(job.context, 'activity', root.id::text, 'activity_spawned',
      jsonb_build_object('job', job.id, 'activity', root.id, 'flow', job.flow, 'name', root.name),
      correlation_id => job.id, traceparent => start.traceparent)
  FROM job, root;
END $$;

-- Takes the lock that entries and steps of an activity take turns with. Where their worker stands still in a transaction,
-- Postgres ends it: it would hold this row, and the job's.
CREATE FUNCTION ledger.take_turn(activity uuid) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM ledger.activity WHERE id = take_turn.activity FOR NO KEY UPDATE;
  PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
END $$;

-- Counts an attempt of leg 1 of an activity and leases it to the owner. A replay is counted too, and leases nothing.
CREATE FUNCTION ledger.enter_leg1(activity uuid, owner uuid, lease interval, most_attempts integer) RETURNS TABLE (
  verdict text, state text, ledger bigint, job_id uuid, context text, name text, request jsonb, attempt integer,
  last_error text, seconds float8, trace text
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM ledger.take_turn(enter_leg1.activity);
  RETURN QUERY
  WITH judged AS MATERIALIZED (
    SELECT activity.*, job.state, job.context, CASE
      WHEN job.state <> 'running' OR failed_at IS NOT NULL THEN 'inactive'
      WHEN leased_until > clock_timestamp() THEN 'held'
      WHEN ledger / 1000000000000 >= 999 THEN 'overflow'
      WHEN ledger.is_set(ledger, 100000000000) THEN 'duplicate'
      WHEN ledger / 1000000000000 - attempts_before >= enter_leg1.most_attempts THEN 'exhausted'
      ELSE 'done'
    END AS verdict
    FROM ledger.activity JOIN ledger.job ON job.id = activity.job_id
    WHERE activity.id = enter_leg1.activity
  ), counted AS (
    UPDATE ledger.activity SET
      ledger = activity.ledger + 1000000000000,
      owner = CASE WHEN verdict = 'done' THEN enter_leg1.owner END,
      leased_until = CASE WHEN verdict = 'done' THEN clock_timestamp() + enter_leg1.lease END
    FROM judged
    WHERE activity.id = judged.id AND verdict IN ('done', 'duplicate')
    RETURNING activity.ledger
  ), now AS (
    SELECT coalesce(counted.ledger, judged.ledger)::bigint AS ledger FROM judged LEFT JOIN counted ON true
  )
  SELECT judged.verdict, judged.state, now.ledger, judged.job_id, judged.context, judged.name, judged.request,
    (now.ledger / 1000000000000 - judged.attempts_before)::integer, judged.last_error,
    extract(epoch FROM judged.leased_until - clock_timestamp())::float8, judged.traceparent
  FROM judged, now;
END $$;

-- Completes leg 1 of an activity, leased to the owner, and puts its request, where it has one, into the outbox: the command
-- with this id and payload to the queue, which is asked so often, a timeout apart.
CREATE FUNCTION ledger.complete_leg1(
  activity uuid, owner uuid, request uuid, queue text, payload jsonb, timeout interval, asks integer
) RETURNS TABLE (verdict text, state text, ledger bigint, emitted bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM ledger.take_turn(complete_leg1.activity);
  RETURN QUERY
  WITH judged AS MATERIALIZED (
    SELECT activity.*, job.state, job.context, job.flow, CASE
      WHEN job.state <> 'running' OR failed_at IS NOT NULL THEN 'inactive'
      WHEN ledger.is_set(ledger, 100000000000) THEN 'duplicate'
      WHEN (owner = complete_leg1.owner AND leased_until > clock_timestamp()) IS NOT TRUE THEN 'lease_lost'
      ELSE 'done'
    END AS verdict
    FROM ledger.activity JOIN ledger.job ON job.id = activity.job_id
    WHERE activity.id = complete_leg1.activity
  ), completed AS (
    UPDATE ledger.activity SET
      ledger = activity.ledger + 100000000000, owner = NULL, leased_until = NULL, last_error = NULL
    FROM judged
    WHERE activity.id = judged.id AND verdict = 'done'
    RETURNING activity.id, activity.job_id, activity.ledger
  ), asked AS (
    INSERT INTO ledger.request (id, activity_id, flow, timeout, asks, due_at)
    SELECT complete_leg1.request, completed.id, judged.flow, complete_leg1.timeout, complete_leg1.asks,
      clock_timestamp() + complete_leg1.timeout
    FROM completed, judged
    WHERE complete_leg1.request IS NOT NULL
    RETURNING id
  ), emitted AS (
    SELECT postroom.emit_command(judged.context, complete_leg1.queue, complete_leg1.payload, 'activity',
      completed.id::text, correlation_id => completed.job_id, id => asked.id, traceparent => judged.traceparent)
    FROM completed, judged, asked
  )
  SELECT judged.verdict, judged.state, coalesce(completed.ledger, judged.ledger)::bigint, (SELECT count(*) FROM emitted)
  FROM judged LEFT JOIN completed ON true;
END $$;

-- Enters leg 2 of an activity with a message, and leases the message to the owner. A message that is new takes an answer
-- that is due, that to its request where it names one, and the ordinal of its guid; what it says is kept, also of one that
-- is refused because its job has failed: a retry of the job brings it back. Of a message that closed the job, attempts are
-- those of the completion. (The entry that closed it may have died before the completion began: it is none of them.)
CREATE FUNCTION ledger.enter_leg2(
  activity uuid, guid text, owner uuid, lease interval, answer jsonb, request uuid, most_attempts integer,
  most_completions integer DEFAULT NULL, traceparent text DEFAULT NULL
) RETURNS TABLE (
  verdict text, state text, job_id uuid, context text, name text, result jsonb, activity_ledger bigint, ledger bigint,
  attempt integer, last_error text, seconds float8, trace text
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM ledger.take_turn(enter_leg2.activity);
  RETURN QUERY
  WITH known AS MATERIALIZED (
    SELECT * FROM ledger.guid WHERE activity_id = enter_leg2.activity AND guid = enter_leg2.guid
  ), tried AS (
    SELECT ledger.is_set(ledger, 100000000000) AS closed,
      attempts - attempts_before - CASE WHEN ledger.is_set(ledger, 100000000000) THEN 1 ELSE 0 END AS known_attempts
    FROM known
  ), judged AS MATERIALIZED (
    SELECT activity.*, job.state, job.context, known.ledger AS known, known.result, known.last_error AS known_error,
      tried.known_attempts, known.leased_until AS held_until, CASE
      WHEN ledger.is_set(known.ledger, 1000000000)
        AND (ledger.is_set(known.ledger, 100000000) OR NOT ledger.is_set(known.ledger, 100000000000)) THEN 'duplicate'
      WHEN activity.failed_at IS NOT NULL THEN 'inactive'
      WHEN job.state <> 'running'
        AND (job.state = 'closed' AND ledger.is_set(known.ledger, 100000000000)) IS NOT TRUE THEN 'inactive'
      WHEN NOT ledger.is_set(activity.ledger, 100000000000) THEN 'forbidden'
      WHEN known.leased_until > clock_timestamp() THEN 'held'
      WHEN known.ledger IS NULL AND activity.answers_taken >= activity.answers_due THEN 'duplicate'
      WHEN known.ledger IS NULL AND EXISTS (
        SELECT FROM ledger.request WHERE id = enter_leg2.request AND answered_by IS NOT NULL
      ) THEN 'duplicate'
      WHEN activity.ledger % 100000000 >= 99999999 THEN 'overflow'
      WHEN tried.known_attempts >= CASE WHEN tried.closed THEN enter_leg2.most_completions ELSE enter_leg2.most_attempts END
        THEN 'exhausted'
      ELSE 'done'
    END AS verdict
    FROM ledger.activity JOIN ledger.job ON job.id = activity.job_id LEFT JOIN known ON true
      LEFT JOIN tried ON true
    WHERE activity.id = enter_leg2.activity
  ), counted AS (
    UPDATE ledger.activity SET
      ledger = activity.ledger + 1,
      answers_taken = activity.answers_taken + CASE WHEN judged.known IS NULL THEN 1 ELSE 0 END
    FROM judged
    WHERE activity.id = judged.id AND verdict = 'done'
    RETURNING activity.id, activity.job_id, activity.ledger
  ), seeded AS (
    INSERT INTO ledger.guid (activity_id, guid, job_id, ledger, answer, owner, leased_until, traceparent)
    SELECT counted.id, enter_leg2.guid, counted.job_id, counted.ledger % 100000000, enter_leg2.answer, enter_leg2.owner,
      clock_timestamp() + enter_leg2.lease, coalesce(enter_leg2.traceparent, judged.traceparent)
    FROM counted, judged
    WHERE judged.known IS NULL
    RETURNING ledger, attempts, attempts_before, traceparent
  ), taken AS (
    UPDATE ledger.guid SET
      attempts = guid.attempts + 1, owner = enter_leg2.owner, leased_until = clock_timestamp() + enter_leg2.lease
    FROM counted
    WHERE guid.activity_id = counted.id AND guid.guid = enter_leg2.guid
      AND EXISTS (SELECT FROM judged WHERE judged.known IS NOT NULL)
    RETURNING guid.ledger, guid.attempts, guid.attempts_before, guid.traceparent
  ), answered AS (
    UPDATE ledger.request SET answered_by = enter_leg2.guid, due_at = NULL
    FROM counted, judged
    WHERE request.id = enter_leg2.request AND request.activity_id = counted.id AND judged.known IS NULL
  ), missed AS (
    INSERT INTO ledger.missed (activity_id, guid, answer, request_id, traceparent)
    SELECT id, enter_leg2.guid, enter_leg2.answer, enter_leg2.request, enter_leg2.traceparent FROM judged
    WHERE verdict = 'inactive' AND state = 'failed' AND judged.known IS NULL
    ON CONFLICT DO NOTHING
  ), entered AS (
    SELECT * FROM seeded UNION ALL SELECT * FROM taken
  )
  SELECT judged.verdict, judged.state, judged.job_id, judged.context, judged.name, judged.result,
    coalesce(counted.ledger, judged.ledger)::bigint, coalesce(entered.ledger, judged.known)::bigint,
    coalesce(entered.attempts - entered.attempts_before, judged.known_attempts), judged.known_error,
    extract(epoch FROM judged.held_until - clock_timestamp())::float8, entered.traceparent
  FROM judged LEFT JOIN counted ON true LEFT JOIN entered ON true;
END $$;

-- Steps 1 and 2, the compound primitive, for a message that is leased to the owner: keeps the result of its work, inserts the
-- children, has the activity entered again for each request of `again`, and for the answer to each command of `requests`, moves
-- the semaphore by their number less one, sets the markers of both steps on both ledgers, and, where an answer that spawned
-- nothing leaves no more open than the job's threshold, closes the job and says so in this message's ledger. What is spawned
-- goes out through the outbox; of an entry that is due again, the event's id is the next message's.
CREATE FUNCTION ledger.spawn(
  activity uuid, guid text, owner uuid, result jsonb,
  children uuid[], child_names text[], child_requests jsonb[], again jsonb[],
  requests uuid[], queues text[], payloads jsonb[], timeouts interval[], asks integer[]
) RETURNS TABLE (
  verdict text, state text, ledger bigint, threshold_hit integer, semaphore integer, emitted bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM ledger.take_turn(spawn.activity);
  RETURN QUERY
  WITH judged AS MATERIALIZED (
    SELECT guid.*, job.state, job.context, job.flow, activity.name,
      cardinality(spawn.again) + cardinality(spawn.requests) AS answers_due,
      cardinality(spawn.children) + cardinality(spawn.again) + cardinality(spawn.requests) - 1 AS delta,
      CASE
        WHEN job.state <> 'running' OR activity.failed_at IS NOT NULL THEN 'inactive'
        WHEN (guid.owner = spawn.owner AND guid.leased_until > clock_timestamp()) IS NOT TRUE THEN 'lease_lost'
        ELSE 'done'
      END AS verdict
    FROM ledger.guid JOIN ledger.activity ON activity.id = guid.activity_id JOIN ledger.job ON job.id = guid.job_id
    WHERE guid.activity_id = spawn.activity AND guid.guid = spawn.guid
  ), moved AS (
    UPDATE ledger.job SET
      semaphore = job.semaphore + delta,
      state = CASE WHEN delta < 0 AND job.semaphore + delta <= job.threshold THEN 'closed' ELSE job.state END
    FROM judged
    WHERE job.id = judged.job_id AND verdict = 'done' AND job.state IS NOT DISTINCT FROM 'running'
    RETURNING job.id, job.semaphore, CASE WHEN job.state = 'closed' THEN 1 ELSE 0 END AS threshold_hit
  ), marked AS (
    UPDATE ledger.guid SET
      ledger = guid.ledger + 11000000000 + threshold_hit * 100000000000,
      result = spawn.result,
      last_error = NULL,
      attempts_before = guid.attempts - threshold_hit,
      owner = CASE threshold_hit WHEN 1 THEN guid.owner END,
      leased_until = CASE threshold_hit WHEN 1 THEN guid.leased_until END
    FROM judged, moved
    WHERE guid.activity_id = judged.activity_id AND guid.guid = judged.guid
    RETURNING guid.activity_id, guid.ledger
  ), noted AS (
    UPDATE ledger.activity SET
      ledger = activity.ledger + CASE WHEN ledger.is_set(activity.ledger, 1000000000) THEN 0 ELSE 11000000000 END,
      answers_due = activity.answers_due + judged.answers_due
    FROM marked, judged
    WHERE activity.id = marked.activity_id
  ), children AS (
    INSERT INTO ledger.activity (id, job_id, parent_id, dimension, place, name, request, traceparent)
    SELECT child.id, judged.job_id, judged.activity_id, judged.ledger % 100000000 - 1, child.place, child.name,
      child.request, judged.traceparent
    FROM moved, judged, unnest(spawn.children, spawn.child_names, spawn.child_requests) WITH ORDINALITY
      AS child (id, name, request, place)
    RETURNING id, job_id, name
  ), asked AS (
    INSERT INTO ledger.request (id, activity_id, flow, timeout, asks, due_at)
    SELECT ask.id, judged.activity_id, judged.flow, ask.timeout, ask.asks, clock_timestamp() + ask.timeout
    FROM moved, judged, unnest(spawn.requests, spawn.timeouts, spawn.asks) AS ask (id, timeout, asks)
    RETURNING id
  ), emitted AS (
    SELECT postroom.emit(judged.context, 'activity', children.id::text, 'activity_spawned',
      jsonb_build_object('job', judged.job_id, 'activity', children.id, 'flow', judged.flow, 'name', children.name),
      correlation_id => judged.job_id, traceparent => judged.traceparent)
    FROM judged, children
    UNION ALL
    SELECT postroom.emit(judged.context, 'activity', judged.activity_id::text, 'activity_cycled',
      jsonb_build_object('job', judged.job_id, 'activity', judged.activity_id, 'flow', judged.flow, 'name', judged.name,
        'request', again.request),
      correlation_id => judged.job_id, traceparent => judged.traceparent)
    FROM moved, judged, unnest(spawn.again) AS again (request)
    UNION ALL
    SELECT postroom.emit_command(judged.context, ask.queue, ask.payload, 'activity', judged.activity_id::text,
      correlation_id => judged.job_id, id => asked.id, traceparent => judged.traceparent)
    FROM judged, asked JOIN unnest(spawn.requests, spawn.queues, spawn.payloads) AS ask (id, queue, payload) USING (id)
  )
  SELECT CASE WHEN verdict = 'done' AND moved.id IS NULL THEN 'inactive' ELSE verdict END, judged.state,
    coalesce(marked.ledger, judged.ledger)::bigint, moved.threshold_hit, moved.semaphore, (SELECT count(*) FROM emitted)
  FROM judged LEFT JOIN marked ON true LEFT JOIN moved ON true;
END $$;

-- Step 3: marks the completion tasks as done by the message, leased to the owner, that closed the job; the job is completed
-- with their result.
CREATE FUNCTION ledger.finish_job(activity uuid, guid text, owner uuid, result jsonb)
RETURNS TABLE (verdict text, state text, ledger bigint, emitted bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM ledger.take_turn(finish_job.activity);
  RETURN QUERY
  WITH judged AS MATERIALIZED (
    SELECT guid.*, job.state, job.context, job.flow, CASE
      WHEN job.state IN ('completed', 'failed', 'cancelled') THEN 'inactive'
      WHEN (guid.owner = finish_job.owner AND guid.leased_until > clock_timestamp()) IS NOT TRUE THEN 'lease_lost'
      WHEN NOT ledger.is_set(guid.ledger, 100000000000) THEN 'forbidden'
      ELSE 'done'
    END AS verdict
    FROM ledger.guid JOIN ledger.job ON job.id = guid.job_id
    WHERE guid.activity_id = finish_job.activity AND guid.guid = finish_job.guid
  ), completed AS (
    UPDATE ledger.job SET state = 'completed', ended_at = clock_timestamp()
    FROM judged
    WHERE job.id = judged.job_id AND verdict = 'done' AND job.state IS NOT DISTINCT FROM 'closed'
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
      jsonb_build_object('job', completed.id, 'flow', judged.flow, 'result', finish_job.result),
      correlation_id => completed.id, traceparent => judged.traceparent)
    FROM judged, completed
  )
  SELECT CASE WHEN verdict = 'done' AND marked.ledger IS NULL THEN 'inactive' ELSE verdict END, judged.state,
    coalesce(marked.ledger, judged.ledger)::bigint, (SELECT count(*) FROM emitted)
  FROM judged LEFT JOIN marked ON true;
END $$;

-- Fails an activity and its job, and says why; no ledger moves.
CREATE FUNCTION ledger.fail(activity uuid, error text)
RETURNS TABLE (verdict text, state text, emitted bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM ledger.take_turn(fail.activity);
  RETURN QUERY
  WITH judged AS MATERIALIZED (
    SELECT job.*, activity.id AS activity_id, activity.name, activity.ledger, activity.traceparent
    FROM ledger.activity JOIN ledger.job ON job.id = activity.job_id
    WHERE activity.id = fail.activity
  ), ended AS (
    UPDATE ledger.job SET state = 'failed', ended_at = clock_timestamp(), error = fail.error
    FROM judged
    WHERE job.id = judged.id AND coalesce(job.state IN ('running', 'closed'), false)
    RETURNING job.id
  ), failed AS (
    UPDATE ledger.activity SET failed_at = clock_timestamp(), error = fail.error, owner = NULL, leased_until = NULL
    FROM judged, ended
    WHERE activity.id = judged.activity_id
  ), emitted AS (
    SELECT postroom.emit(judged.context, 'job', ended.id::text, 'job_failed',
      jsonb_build_object('job', ended.id, 'flow', judged.flow, 'activity', judged.activity_id, 'name', judged.name,
        'ledger', lpad(judged.ledger::text, 15, '0'), 'error', fail.error),
      correlation_id => ended.id, traceparent => judged.traceparent)
    FROM judged, ended
  )
  SELECT CASE WHEN ended.id IS NULL THEN 'inactive' ELSE 'done' END, judged.state, (SELECT count(*) FROM emitted)
  FROM judged LEFT JOIN ended ON true;
END $$;

-- Gives up the lease that the owner has on a message of an activity, so that the next attempt need not wait for its end,
-- and keeps why this one failed.
CREATE FUNCTION ledger.release_leg2(activity uuid, guid text, owner uuid, error text) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE ledger.guid SET owner = NULL, leased_until = NULL, last_error = release_leg2.error
  WHERE activity_id = release_leg2.activity AND guid = release_leg2.guid AND owner = release_leg2.owner;
END $$;
