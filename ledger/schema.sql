-- The schema of jobs as all migrations together leave it; a test proves that they do.

-- Jobs as trees of activities, and the ledgers that make each of their steps happen once (seed activity-collation-ledger).
--
-- A job has so many obligations open as its semaphore says: each activity owes one answer, and one more for each cycle.
--
--     running     obligations are open
--     closed      none is; the message whose ledger has the snapshot has the completion tasks to do
--     completed   they are done
--     failed      an activity failed, and with it the job; an operator may let it go on, as running or closed
--     cancelled   an operator ended it
--
-- Rows are always locked in one order: activity, message, job.

CREATE SCHEMA ledger;

-- Whether the digit of weight `marker` is 1.
CREATE FUNCTION ledger.is_set(ledger bigint, marker bigint) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN ledger / marker % 10 = 1;

-- Whether the digits are at most 15, and those at positions 4 to 7 are 0 or 1.
CREATE FUNCTION ledger.is_ledger(ledger bigint) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN ledger BETWEEN 0 AND 999999999999999
  AND ledger / 100000000000 % 10 <= 1 AND ledger / 10000000000 % 10 <= 1
  AND ledger / 1000000000 % 10 <= 1 AND ledger / 100000000 % 10 <= 1;

-- Whether no counter was set back and no marker was unset (Rule A).
CREATE FUNCTION ledger.only_grew(before bigint, after bigint) RETURNS boolean LANGUAGE sql IMMUTABLE
RETURN after / 1000000000000 >= before / 1000000000000
  AND after / 100000000000 % 10 >= before / 100000000000 % 10
  AND after / 10000000000 % 10 >= before / 10000000000 % 10
  AND after / 1000000000 % 10 >= before / 1000000000 % 10
  AND after / 100000000 % 10 >= before / 100000000 % 10
  AND after % 100000000 >= before % 100000000;

CREATE TABLE ledger.job (
  id uuid PRIMARY KEY,
  context text COLLATE "C" NOT NULL CHECK (
    context ~ '^[a-z][a-z0-9_]*$' AND length(context) <= 64 AND context <> 'cmd'
  ),
  flow text COLLATE "C" NOT NULL CHECK (flow ~ '^[a-z][a-z0-9_-]*$' AND length(flow) <= 64),
  state text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'closed', 'completed', 'failed', 'cancelled')),
  semaphore integer NOT NULL DEFAULT 1 CHECK (semaphore >= 0),
  started_at timestamptz NOT NULL DEFAULT now(),
  ended_at timestamptz,
  error text,

  CONSTRAINT a_job_is_closed_when_nothing_is_open CHECK (
    CASE WHEN state = 'running' THEN semaphore > 0 WHEN state IN ('closed', 'completed') THEN semaphore = 0 ELSE true END
  ),
  CONSTRAINT an_ended_job_has_an_end CHECK (
    (state IN ('completed', 'failed', 'cancelled')) = (ended_at IS NOT NULL)
  ),
  CONSTRAINT a_job_that_ended_early_says_why CHECK ((state IN ('failed', 'cancelled')) = (error IS NOT NULL))
) WITH (fillfactor = 50);
CREATE INDEX job_started ON ledger.job (started_at, id);
CREATE INDEX job_unended ON ledger.job (flow, context, started_at) WHERE state IN ('running', 'closed');

-- An activity; the place of a child is its number among those that one message of its parent spawned, and the dimension
-- says which of the parent's messages that was.
CREATE TABLE ledger.activity (
  id uuid PRIMARY KEY,
  job_id uuid NOT NULL REFERENCES ledger.job ON DELETE CASCADE,
  parent_id uuid REFERENCES ledger.activity ON DELETE CASCADE,
  dimension integer CHECK (dimension >= 0),
  place integer CHECK (place >= 1),
  name text COLLATE "C" NOT NULL CHECK (name ~ '^[a-z][a-z0-9_-]*$' AND length(name) <= 64),
  request jsonb NOT NULL,
  spawned_at timestamptz NOT NULL DEFAULT now(),
  ledger bigint NOT NULL DEFAULT 0,
  answers_due integer NOT NULL DEFAULT 1,
  answers_taken integer NOT NULL DEFAULT 0,
  owner uuid,
  leased_until timestamptz,
  last_error text,
  failed_at timestamptz,
  error text,

  UNIQUE (parent_id, dimension, place),
  CONSTRAINT ledger_has_15_digits CHECK (ledger BETWEEN 0 AND 999999999999999),
  CONSTRAINT markers_are_0_or_1 CHECK (ledger.is_ledger(ledger)),
  CONSTRAINT leg_2_follows_leg_1 CHECK (ledger % 100000000000 = 0 OR ledger.is_set(ledger, 100000000000)),
  CONSTRAINT steps_are_done_in_order CHECK (
    (ledger.is_set(ledger, 10000000000) OR NOT ledger.is_set(ledger, 1000000000))
    AND (ledger.is_set(ledger, 1000000000) OR NOT ledger.is_set(ledger, 100000000))
  ),
  CONSTRAINT no_answer_is_taken_that_is_not_due CHECK (answers_taken BETWEEN 0 AND answers_due),
  CONSTRAINT a_child_has_a_place CHECK (num_nonnulls(parent_id, dimension, place) IN (0, 3)),
  CONSTRAINT a_lease_has_an_owner_and_an_end CHECK ((owner IS NULL) = (leased_until IS NULL)),
  CONSTRAINT a_failed_activity_says_why CHECK ((failed_at IS NULL) = (error IS NULL))
) WITH (fillfactor = 70);
CREATE INDEX activity_job ON ledger.activity (job_id);
CREATE UNIQUE INDEX a_job_has_one_root ON ledger.activity (job_id) WHERE parent_id IS NULL;

-- What activities asked for, by the message id of the command that asks, which is what an answer names as its cause. The
-- first answer counts. Where none has come when one is due, the command goes out again, `asks` times in all.
CREATE TABLE ledger.request (
  id uuid PRIMARY KEY,
  activity_id uuid NOT NULL REFERENCES ledger.activity ON DELETE CASCADE,
  timeout interval CHECK (timeout > interval '0'),
  asks integer NOT NULL DEFAULT 1,
  asked integer NOT NULL DEFAULT 1,
  due_at timestamptz,
  answered_by text COLLATE "C",

  CONSTRAINT it_is_not_asked_more_often_than_allowed CHECK (asked BETWEEN 1 AND asks),
  CONSTRAINT an_answer_is_due_in_time CHECK (due_at IS NULL OR (timeout IS NOT NULL AND answered_by IS NULL))
);
CREATE INDEX request_activity ON ledger.request (activity_id);
CREATE INDEX request_due ON ledger.request (due_at) WHERE due_at IS NOT NULL;

-- The ledger of each leg-2 message, what it says (for an operator's retry), and what the work of step 1 returned for step 2
-- to go on with.
CREATE TABLE ledger.guid (
  activity_id uuid NOT NULL REFERENCES ledger.activity ON DELETE CASCADE,
  guid text COLLATE "C" NOT NULL CHECK (guid ~ '^[!-~]+$' AND length(guid) <= 255),
  job_id uuid NOT NULL REFERENCES ledger.job ON DELETE CASCADE,
  ledger bigint NOT NULL,
  attempts integer NOT NULL DEFAULT 1 CHECK (attempts >= 1),
  answer jsonb NOT NULL DEFAULT 'null',
  result jsonb,
  owner uuid,
  leased_until timestamptz,
  last_error text,

  PRIMARY KEY (activity_id, guid),
  CONSTRAINT ledger_has_15_digits CHECK (ledger BETWEEN 0 AND 999999999999999),
  CONSTRAINT markers_are_0_or_1 CHECK (ledger.is_ledger(ledger)),
  CONSTRAINT a_message_has_an_ordinal_and_no_attempts CHECK (ledger % 100000000 >= 1 AND ledger < 1000000000000),
  CONSTRAINT steps_are_done_in_order CHECK (
    (ledger.is_set(ledger, 10000000000) OR NOT ledger.is_set(ledger, 1000000000))
    AND (ledger.is_set(ledger, 1000000000) OR NOT ledger.is_set(ledger, 100000000000))
    AND (ledger.is_set(ledger, 100000000000) OR NOT ledger.is_set(ledger, 100000000))
  ),
  CONSTRAINT work_that_is_done_has_a_result CHECK (ledger.is_set(ledger, 10000000000) = (result IS NOT NULL)),
  CONSTRAINT a_lease_has_an_owner_and_an_end CHECK ((owner IS NULL) = (leased_until IS NULL))
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX one_message_closes_a_job ON ledger.guid (job_id) WHERE ledger.is_set(ledger, 100000000000);

-- What came for a job while it was failed: it was acknowledged, and a retry of the job brings it back.
CREATE TABLE ledger.missed (
  activity_id uuid NOT NULL REFERENCES ledger.activity ON DELETE CASCADE,
  guid text COLLATE "C" NOT NULL CHECK (guid ~ '^[!-~]+$' AND length(guid) <= 255),
  answer jsonb NOT NULL,
  request_id uuid,

  PRIMARY KEY (activity_id, guid)
);

CREATE FUNCTION ledger.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation';
END $$;

CREATE TRIGGER only_grows BEFORE UPDATE ON ledger.activity
  FOR EACH ROW WHEN (NOT ledger.only_grew(OLD.ledger, NEW.ledger))
  EXECUTE FUNCTION ledger.refuse('a ledger only grows');
CREATE TRIGGER only_grows BEFORE UPDATE ON ledger.guid
  FOR EACH ROW WHEN (NOT ledger.only_grew(OLD.ledger, NEW.ledger) OR OLD.ledger % 100000000 <> NEW.ledger % 100000000)
  EXECUTE FUNCTION ledger.refuse('a ledger only grows, and the ordinal of a message stays');
CREATE TRIGGER starts_empty BEFORE INSERT ON ledger.activity
  FOR EACH ROW WHEN (NEW.ledger <> 0)
  EXECUTE FUNCTION ledger.refuse('the ledger of an activity starts with zeros');
CREATE TRIGGER starts_with_its_ordinal BEFORE INSERT ON ledger.guid
  FOR EACH ROW WHEN (NEW.ledger >= 100000000)
  EXECUTE FUNCTION ledger.refuse('the ledger of a message starts with its ordinal alone');
-- Only an operator's retry lets a failed job go on; it opens and closes nothing.
CREATE TRIGGER ends_once BEFORE UPDATE ON ledger.job
  FOR EACH ROW WHEN (
    OLD.state IN ('completed', 'cancelled')
    OR (OLD.state = 'failed' AND (NEW.state NOT IN ('running', 'closed') OR NEW.semaphore <> OLD.semaphore))
    OR (OLD.state = 'closed' AND NEW.state = 'running') OR (OLD.state = 'running' AND NEW.state = 'completed')
  )
  EXECUTE FUNCTION ledger.refuse('a job that has ended stays as it is, and one is closed before it is completed');

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
