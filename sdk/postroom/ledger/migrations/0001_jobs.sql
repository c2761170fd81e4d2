-- Jobs as trees of activities, and the ledgers that make each of their steps happen once (docs/contract/jobs.md#jobs-1).
--
-- A job has so many obligations open as its semaphore says: each activity owes one answer, and one more for each cycle. It
-- is closed by the answer that leaves no more of them open than its threshold, usually 0.
--
--     running     obligations are open
--     closed      none is, or as few as may be; the message whose ledger has the snapshot has the completion tasks to do
--     completed   they are done
--     failed      an activity failed, and with it the job; an operator may let it go on, as running or closed
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

-- The two kinds of ledgers. What their digits may say is checked here and not at the tables, since Postgres keeps the checks
-- of a domain ready, and reads those of a table anew for each statement: a third of the time that a step took.
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

-- What came for a job while it was failed: it was acknowledged, and a retry of the job brings it back.
CREATE TABLE ledger.missed (
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

-- Only an operator's retry lets a failed job go on; it opens and closes nothing.
CREATE FUNCTION ledger.check_state() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF OLD.state IN ('completed', 'cancelled')
    OR (OLD.state = 'failed' AND (NEW.state NOT IN ('running', 'closed') OR NEW.semaphore <> OLD.semaphore))
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
  verb text NOT NULL CHECK (verb IN ('retry', 'cancel')),
  actor text NOT NULL,
  reason text NOT NULL
);
CREATE INDEX operator_log_job ON ledger.operator_log (job_id);
