-- Jobs as trees of activities, and the ledgers that make each of their steps happen once (docs/contract/jobs.md#jobs-1).
--
-- A job has so many obligations open as its semaphore says: each activity owes one answer, and one more for each cycle. It
-- is closed by the answer that leaves no more of them open than its threshold, usually 0.
--
--     running     obligations are open
--     closed      none is, or as few as may be; the message whose ledger has the snapshot has the completion tasks to do
--     completed   they are done
--     failed      an activity failed, and with it the job; an operator may let it go on, as running or closed, or end it
--     cancelled   an operator ended it
--
-- Rows are always locked in one order: activity, message, job.

CREATE SCHEMA ledger;

-- Whether the digit of weight `marker` is 1.
CREATE FUNCTION ledger.is_set(ledger bigint, marker bigint) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN ledger / marker % 10 = 1;

-- Whether the digits at positions 4 to 7 are 0 or 1.
CREATE FUNCTION ledger.has_markers(ledger bigint) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN ledger / 100000000000 % 10 <= 1 AND ledger / 10000000000 % 10 <= 1
  AND ledger / 1000000000 % 10 <= 1 AND ledger / 100000000 % 10 <= 1;

-- Whether no counter was set back and no marker was unset (docs/contract/jobs.md#jobs-3).
CREATE FUNCTION ledger.only_grew(before bigint, after bigint) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN after / 1000000000000 >= before / 1000000000000
  AND after / 100000000000 % 10 >= before / 100000000000 % 10
  AND after / 10000000000 % 10 >= before / 10000000000 % 10
  AND after / 1000000000 % 10 >= before / 1000000000 % 10
  AND after / 100000000 % 10 >= before / 100000000 % 10
  AND after % 100000000 >= before % 100000000;

-- Whether a lease keeps others off: no longer than any may last (`jobs.lease_seconds`), whatever clock has given it. Volatile,
-- as the clock is, so that Postgres puts it into the statement.
CREATE FUNCTION ledger.is_held(leased_until timestamptz) RETURNS boolean LANGUAGE sql VOLATILE
RETURN leased_until > clock_timestamp() AND leased_until <= clock_timestamp() + interval '1 hour';

-- The two kinds of ledgers. What their digits may say is checked here and not at the tables, since Postgres keeps the checks
-- of a domain ready, and reads those of a table again for each statement: a third of the time that a step took.
CREATE DOMAIN ledger.activity_ledger AS bigint
  CONSTRAINT ledger_has_15_digits CHECK (VALUE BETWEEN 0 AND 999999999999999)
  CONSTRAINT markers_are_0_or_1 CHECK (ledger.has_markers(VALUE))
  CONSTRAINT leg_2_follows_leg_1 CHECK (VALUE % 100000000000 = 0 OR ledger.is_set(VALUE, 100000000000))
  CONSTRAINT steps_are_done_in_order CHECK (
    (ledger.is_set(VALUE, 10000000000) OR NOT ledger.is_set(VALUE, 1000000000))
    AND (ledger.is_set(VALUE, 1000000000) OR NOT ledger.is_set(VALUE, 100000000))
  );
CREATE DOMAIN ledger.guid_ledger AS bigint
  CONSTRAINT ledger_has_15_digits CHECK (VALUE BETWEEN 0 AND 999999999999999)
  CONSTRAINT markers_are_0_or_1 CHECK (ledger.has_markers(VALUE))
  CONSTRAINT a_message_has_an_ordinal_and_no_attempts CHECK (VALUE % 100000000 >= 1 AND VALUE < 1000000000000)
  CONSTRAINT steps_are_done_in_order CHECK (
    (ledger.is_set(VALUE, 10000000000) OR NOT ledger.is_set(VALUE, 1000000000))
    AND (ledger.is_set(VALUE, 1000000000) OR NOT ledger.is_set(VALUE, 100000000000))
    AND (ledger.is_set(VALUE, 100000000000) OR NOT ledger.is_set(VALUE, 100000000))
  );

CREATE TABLE ledger.job (
  id uuid PRIMARY KEY,
  context text COLLATE "C" NOT NULL CHECK (
    context ~ '^[a-z][a-z0-9_]*$' AND length(context) <= 64 AND context <> 'cmd'
  ),
  flow text COLLATE "C" NOT NULL CHECK (flow ~ '^[a-z][a-z0-9_-]*$' AND length(flow) <= 64),
  state text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'closed', 'completed', 'failed', 'cancelled')),
  semaphore integer NOT NULL DEFAULT 1 CHECK (semaphore >= 0),
  threshold integer NOT NULL DEFAULT 0 CHECK (threshold >= 0),
  started_at timestamptz NOT NULL DEFAULT now(),
  ended_at timestamptz,
  error text,

  CONSTRAINT a_job_is_closed_when_no_more_is_open_than_may_be CHECK (
    CASE WHEN state = 'running' THEN semaphore > 0 WHEN state IN ('closed', 'completed') THEN semaphore <= threshold
    ELSE true END
  ),
  CONSTRAINT an_ended_job_has_an_end CHECK (
    (state IN ('completed', 'failed', 'cancelled')) = (ended_at IS NOT NULL)
  ),
  CONSTRAINT a_job_that_ended_early_says_why CHECK ((state IN ('failed', 'cancelled')) = (error IS NOT NULL))
) WITH (fillfactor = 50);
CREATE INDEX job_started ON ledger.job (started_at, id);
CREATE INDEX job_ended_early ON ledger.job (state, started_at, id) WHERE state IN ('failed', 'cancelled');
CREATE INDEX job_ended ON ledger.job (ended_at) WHERE state IN ('completed', 'cancelled');
CREATE INDEX job_unended ON ledger.job (flow, context, started_at) WHERE state IN ('running', 'closed');

-- A job that retention has removed: its id begins no other, and starting it again does nothing.
CREATE TABLE ledger.removed_job (
  id uuid PRIMARY KEY,
  context text COLLATE "C" NOT NULL,
  flow text COLLATE "C" NOT NULL,
  removed_at timestamptz NOT NULL DEFAULT now()
);

-- An activity; the place of a child is its number among those that one message of its parent spawned, and the dimension
-- says which of the parent's messages that was. The traceparent is that of what spawned it. Attempts of leg 1 before the last retry of its job count no more.
CREATE TABLE ledger.activity (
  id uuid PRIMARY KEY,
  job_id uuid NOT NULL REFERENCES ledger.job ON DELETE CASCADE,
  parent_id uuid REFERENCES ledger.activity ON DELETE CASCADE,
  dimension integer CHECK (dimension >= 0),
  place integer CHECK (place >= 1),
  name text COLLATE "C" NOT NULL CHECK (name ~ '^[a-z][a-z0-9_-]*$' AND length(name) <= 64),
  request jsonb NOT NULL,
  traceparent text,
  spawned_at timestamptz NOT NULL DEFAULT now(),
  ledger ledger.activity_ledger NOT NULL DEFAULT 0,
  attempts_before integer NOT NULL DEFAULT 0 CHECK (attempts_before BETWEEN 0 AND 999),
  answers_due integer NOT NULL DEFAULT 1,
  answers_taken integer NOT NULL DEFAULT 0,
  owner uuid,
  leased_until timestamptz,
  last_error text,
  failed_at timestamptz,
  error text,

  UNIQUE (job_id, id),
  UNIQUE (parent_id, dimension, place),
  CONSTRAINT no_answer_is_taken_that_is_not_due CHECK (answers_taken BETWEEN 0 AND answers_due),
  CONSTRAINT a_child_has_a_place CHECK (num_nonnulls(parent_id, dimension, place) IN (0, 3)),
  CONSTRAINT a_lease_has_an_owner_and_an_end CHECK ((owner IS NULL) = (leased_until IS NULL)),
  CONSTRAINT a_failed_activity_says_why CHECK ((failed_at IS NULL) = (error IS NULL))
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX a_job_has_one_root ON ledger.activity (job_id) WHERE parent_id IS NULL;

-- What activities asked for, by the message id of the command that asks, which is what an answer names as its cause. The
-- first answer counts. Where none has come when one is due, the command goes out again, `asks` times in all. The flow is that
-- of the job, and stands here so that its workers find theirs among those of all flows.
CREATE TABLE ledger.request (
  id uuid PRIMARY KEY,
  activity_id uuid NOT NULL REFERENCES ledger.activity ON DELETE CASCADE,
  flow text COLLATE "C" NOT NULL,
  timeout interval CHECK (timeout > interval '0'),
  asks integer NOT NULL DEFAULT 1,
  asked integer NOT NULL DEFAULT 1,
  due_at timestamptz,
  answered_by text COLLATE "C",

  CONSTRAINT it_is_not_asked_more_often_than_allowed CHECK (asked BETWEEN 1 AND asks),
  CONSTRAINT an_answer_is_due_in_time CHECK (due_at IS NULL OR (timeout IS NOT NULL AND answered_by IS NULL))
);
CREATE INDEX request_activity ON ledger.request (activity_id);
CREATE INDEX request_due ON ledger.request (flow, due_at) WHERE due_at IS NOT NULL;

-- The ledger of each leg-2 message, what it says (for an operator's retry), and the result of its work. Attempts
-- before the last retry of its job count no more; nor do those of steps 1 and 2 for step 3.
CREATE TABLE ledger.guid (
  activity_id uuid NOT NULL,
  guid text COLLATE "C" NOT NULL CHECK (guid ~ '^[!-~]+$' AND length(guid) <= 255),
  job_id uuid NOT NULL,
  ledger ledger.guid_ledger NOT NULL,
  attempts integer NOT NULL DEFAULT 1,
  attempts_before integer NOT NULL DEFAULT 0,
  answer jsonb NOT NULL DEFAULT 'null',
  traceparent text,
  result jsonb,
  owner uuid,
  leased_until timestamptz,
  last_error text,

  PRIMARY KEY (activity_id, guid),
  FOREIGN KEY (job_id, activity_id) REFERENCES ledger.activity (job_id, id) ON DELETE CASCADE,
  CONSTRAINT attempts_are_counted CHECK (attempts >= 1 AND attempts_before BETWEEN 0 AND attempts),
  CONSTRAINT work_that_is_done_has_a_result CHECK (ledger.is_set(ledger, 10000000000) = (result IS NOT NULL)),
  CONSTRAINT a_lease_has_an_owner_and_an_end CHECK ((owner IS NULL) = (leased_until IS NULL))
) WITH (fillfactor = 50);
CREATE INDEX guid_message ON ledger.guid (guid);
CREATE UNIQUE INDEX one_message_closes_a_job ON ledger.guid (job_id) WHERE ledger.is_set(ledger, 100000000000);

-- What came for a job while it was failed: it was acknowledged, and a retry of the job brings it back, in its order.
CREATE TABLE ledger.missed (
  arrival bigint GENERATED ALWAYS AS IDENTITY,
  activity_id uuid NOT NULL REFERENCES ledger.activity ON DELETE CASCADE,
  guid text COLLATE "C" NOT NULL CHECK (guid ~ '^[!-~]+$' AND length(guid) <= 255),
  answer jsonb NOT NULL,
  request_id uuid,
  traceparent text,

  PRIMARY KEY (activity_id, guid)
);
CREATE INDEX missed_message ON ledger.missed (guid);

-- Messages that a worker took without having their activity (an older deployment, a name that changed): acknowledged, and
-- kept for a worker that has it. Of leg 2, with what the message says, and as which event it came: which of them answer,
-- the activity knows, that is, a worker that has it.
CREATE TABLE ledger.set_aside (
  activity_id uuid NOT NULL REFERENCES ledger.activity ON DELETE CASCADE,
  guid text COLLATE "C" NOT NULL CHECK (guid ~ '^[!-~]+$' AND length(guid) <= 255),
  at timestamptz NOT NULL DEFAULT now(),
  worker text NOT NULL,
  leg integer NOT NULL CHECK (leg IN (1, 2)),
  answer jsonb,
  request_id uuid,
  event text COLLATE "C",
  traceparent text,

  PRIMARY KEY (activity_id, guid),
  CONSTRAINT leg_2_has_an_answer CHECK (leg = 2 OR num_nonnulls(answer, request_id, event) = 0)
);
CREATE INDEX set_aside_message ON ledger.set_aside (guid);
CREATE INDEX set_aside_request ON ledger.set_aside (request_id) WHERE request_id IS NOT NULL;

-- The rules of every change: functions, whose expressions Postgres keeps ready, unlike a trigger's condition.

CREATE FUNCTION ledger.refuse(rule text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '%', rule USING ERRCODE = 'integrity_constraint_violation';
END $$;

CREATE FUNCTION ledger.check_activity_ledger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' AND NEW.ledger <> 0 THEN
    PERFORM ledger.refuse('the ledger of an activity starts with zeros');
  ELSIF TG_OP = 'UPDATE' AND NOT ledger.only_grew(OLD.ledger, NEW.ledger) THEN
    PERFORM ledger.refuse('a ledger only grows');
  END IF;
  RETURN NEW;
END $$;

CREATE FUNCTION ledger.check_guid_ledger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' AND NEW.ledger >= 100000000 THEN
    PERFORM ledger.refuse('the ledger of a message starts with its ordinal alone');
  ELSIF TG_OP = 'UPDATE' AND (
    NOT ledger.only_grew(OLD.ledger, NEW.ledger) OR OLD.ledger % 100000000 <> NEW.ledger % 100000000
  ) THEN
    PERFORM ledger.refuse('a ledger only grows, and the ordinal of a message stays');
  END IF;
  RETURN NEW;
END $$;

-- Only an operator lets a failed job go on, or ends it; neither opens nor closes anything.
CREATE FUNCTION ledger.check_state() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF OLD.state IN ('completed', 'cancelled')
    OR (OLD.state = 'failed'
      AND (NEW.state NOT IN ('running', 'closed', 'cancelled') OR NEW.semaphore <> OLD.semaphore))
    OR (OLD.state = 'closed' AND NEW.state = 'running') OR (OLD.state = 'running' AND NEW.state = 'completed')
  THEN
    PERFORM ledger.refuse('a job that has ended stays as it is, and one is closed before it is completed');
  END IF;
  RETURN NEW;
END $$;

CREATE TRIGGER only_grows BEFORE INSERT OR UPDATE OF ledger ON ledger.activity
  FOR EACH ROW EXECUTE FUNCTION ledger.check_activity_ledger();
CREATE TRIGGER only_grows BEFORE INSERT OR UPDATE OF ledger ON ledger.guid
  FOR EACH ROW EXECUTE FUNCTION ledger.check_guid_ledger();
CREATE TRIGGER ends_once BEFORE UPDATE ON ledger.job
  FOR EACH ROW EXECUTE FUNCTION ledger.check_state();

-- What operators did to jobs.
CREATE TABLE ledger.operator_log (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  job_id uuid NOT NULL REFERENCES ledger.job ON DELETE CASCADE,
  at timestamptz NOT NULL DEFAULT now(),
  verb text NOT NULL CHECK (verb <> ''),
  actor text NOT NULL,
  reason text NOT NULL
);
CREATE INDEX operator_log_job ON ledger.operator_log (job_id);

-- The primitives.
--
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
      WHEN ledger.is_held(leased_until) THEN 'held'
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
      WHEN ledger.is_held(known.leased_until) THEN 'held'
      WHEN known.ledger IS NULL
        AND enter_leg2.request IS NOT NULL AND NOT EXISTS (SELECT FROM ledger.request WHERE id = enter_leg2.request)
        AND EXISTS (SELECT FROM ledger.guid WHERE activity_id = activity.id AND NOT ledger.is_set(ledger, 1000000000))
        THEN 'forbidden'
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

-- Fails an activity and its job, and says why; no ledger moves. A job that is closed waits for its completion alone, which only
-- the activity that closed it can fail.
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
    WHERE job.id = judged.id AND coalesce(job.state = 'running' OR (job.state = 'closed' AND EXISTS (
      SELECT FROM ledger.guid
      WHERE guid.activity_id = judged.activity_id AND ledger.is_set(guid.ledger, 100000000000)
    )), false)
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
