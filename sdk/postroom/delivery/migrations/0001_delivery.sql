-- The event outbox (docs/contract/delivery.md#delivery-11) and `postroom.emit`, by which any service in this
-- database writes to it.
--
-- The columns from `position` on are Postroom's own. A row is unpublished while `published_at` is null; it is published
-- once, and again under the next `epoch` where the stream has lost it (docs/contract/delivery.md#delivery-22).

CREATE TABLE postroom.outbox_events (
  id uuid PRIMARY KEY,
  aggregate_type text NOT NULL,
  aggregate_id text COLLATE "C" NOT NULL,
  event_type text NOT NULL,
  event_version integer NOT NULL DEFAULT 1,
  payload jsonb NOT NULL,
  occurred_at timestamptz NOT NULL DEFAULT now(),
  correlation_id uuid,
  causation_id uuid,
  published_at timestamptz,
  publish_attempts integer NOT NULL DEFAULT 0,
  publish_error text,

  -- The order of an aggregate. Of two events of which one was committed before the other's transaction wrote its own,
  -- the earlier has the lower number; two that were written at the same time have no order before the publisher's.
  position bigint GENERATED ALWAYS AS IDENTITY,
  subject text COLLATE "C" NOT NULL,
  traceparent text,
  next_attempt_at timestamptz NOT NULL DEFAULT now(),

  -- Where the server says that it stands: the stream, when that one was created, the number in it, and how often the
  -- event was published again because that stream had lost it.
  stream text COLLATE "C",
  stream_created_at timestamptz,
  stream_sequence bigint,
  epoch integer NOT NULL DEFAULT 0,

  CONSTRAINT an_event_occurred_since_the_year_1 CHECK (occurred_at >= '0001-01-01 00:00:00+00'),  -- none before it can be read
  CONSTRAINT an_aggregate_has_an_id CHECK (aggregate_id <> ''),
  CONSTRAINT an_event_has_a_type CHECK (event_type <> ''),
  CONSTRAINT versions_count_from_one CHECK (event_version >= 1),
  CONSTRAINT attempts_are_counted CHECK (publish_attempts >= 0 AND epoch >= 0),
  CONSTRAINT a_place_in_a_stream_is_whole CHECK (
    num_nonnulls(stream, stream_created_at, stream_sequence) = CASE WHEN published_at IS NULL THEN 0 ELSE 3 END
  ),
  -- Every change of a row looks at its checks, and an expression costs by the bounds that it counts to: words are
  -- measured only in a subject that could hold too long a one.
  CONSTRAINT a_subject_is_an_event_or_a_command CHECK (
    subject ~ '^[a-z][a-z0-9_]*\.event\.[a-z][a-z0-9_]*\.v[1-9][0-9]{0,8}$'
    OR subject ~ '^cmd\.[a-z][a-z0-9_]*(\.[a-z][a-z0-9_-]*){3,}$'
  ),
  CONSTRAINT words_of_a_subject_have_64_characters CHECK (octet_length(subject) <= 64 OR subject !~ '[^.]{65}')
);
-- The index of the unpublished, in the order in which they are claimed.
CREATE INDEX idx_outbox_unpublished ON postroom.outbox_events (aggregate_id, position) WHERE published_at IS NULL;
CREATE INDEX idx_outbox_correlation ON postroom.outbox_events (correlation_id) WHERE correlation_id IS NOT NULL;
CREATE INDEX outbox_events_causation ON postroom.outbox_events (causation_id) WHERE causation_id IS NOT NULL;
-- Rows lie about in the order of their publishing: a coarse index is enough for "since" and "before", and costs nothing.
CREATE INDEX outbox_events_published ON postroom.outbox_events USING brin (published_at) WITH (autosummarize = on);
-- A number of a stream is one event's. Two workers that mark two with the same at once would not see each other.
CREATE UNIQUE INDEX outbox_events_place ON postroom.outbox_events (stream, stream_sequence, stream_created_at)
  WHERE published_at IS NOT NULL;

-- The mesh of a subject: the first word, or the second where the subject is a command's.
CREATE FUNCTION postroom.context_of(subject text) RETURNS text LANGUAGE sql IMMUTABLE
RETURN split_part(subject, '.', CASE WHEN starts_with(subject, 'cmd.') THEN 2 ELSE 1 END);

-- Whether a row may be published again: its time has come, or is further ahead than any wait, so that a clock that was ahead
-- has set it.
CREATE FUNCTION postroom.is_due(next_attempt_at timestamptz, longest_wait interval) RETURNS boolean LANGUAGE sql STABLE
RETURN next_attempt_at <= now() OR next_attempt_at > now() + longest_wait;

-- Refuses an event that occurs more than a minute ahead (docs/contract/delivery.md#delivery-14). A CHECK would be looked at in
-- every change of a row too: where a clock that was ahead has dated an event, nothing could note that it is published.
CREATE FUNCTION postroom.refuse_future_event() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'FUTURE_EVENT: the event occurred at %, which is more than a minute ahead of %', NEW.occurred_at, now()
    USING ERRCODE = 'check_violation', CONSTRAINT = 'POL-047-002';
END $$;
CREATE TRIGGER occurred_not_future BEFORE INSERT ON postroom.outbox_events
  FOR EACH ROW WHEN (NEW.occurred_at > now() + interval '1 minute') EXECUTE FUNCTION postroom.refuse_future_event();

-- Subjects that the config of a worker declares streams for: they may be emitted into though no mesh has that name.
CREATE TABLE postroom.declared_subjects (
  subjects text COLLATE "C" PRIMARY KEY,  -- as NATS writes them
  pattern text COLLATE "C" NOT NULL  -- as a regular expression
);

-- Raises 23503 (UNKNOWN_MESH) for a subject that no stream is meant to take: it is no mesh's, and no worker declares one.
-- Where the broker's tables are in another database, nobody here can tell. With its owner's rights: a service that emits
-- need not see the meshes.
CREATE FUNCTION postroom.check_mesh(context text, subject text) RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF to_regclass('mesh.mesh') IS NULL THEN
    RETURN;
  END IF;
  IF NOT EXISTS (SELECT FROM mesh.mesh WHERE mesh.slug = check_mesh.context)
    AND NOT EXISTS (SELECT FROM postroom.declared_subjects AS declared WHERE check_mesh.subject ~ declared.pattern)
  THEN
    RAISE EXCEPTION 'UNKNOWN_MESH: there is no mesh %, so % would never be published: correct the name, or create the mesh '
      '(postroom mesh create %)', context, subject, context
      USING ERRCODE = 'foreign_key_violation', CONSTRAINT = 'UNKNOWN_MESH',
      HINT = 'To do without a mesh, declare a stream for that subject in the config of a worker, and start it first.';
  END IF;
END $$;

-- Puts an event into the outbox and returns its id; it is published if, and only if, the caller's transaction commits.
--
-- Refuses with SQLSTATE 23514 and the policy as the name of the constraint: INVALID_OUTBOX without id or event type, before
-- the year 1, or where the two names and the version make no subject (docs/contract/delivery.md#delivery-13); FUTURE_EVENT more than a
-- minute ahead (docs/contract/delivery.md#delivery-14). And with 23503, UNKNOWN_MESH, where no mesh has that name (see
-- `check_mesh`).
CREATE FUNCTION postroom.emit(
  context text,
  aggregate_type text,
  aggregate_id text,
  event_type text,
  payload jsonb,
  event_version integer DEFAULT 1,
  correlation_id uuid DEFAULT NULL,
  causation_id uuid DEFAULT NULL,
  traceparent text DEFAULT NULL,
  occurred_at timestamptz DEFAULT now(),
  id uuid DEFAULT gen_random_uuid()
) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
  subject text := context || '.event.' || event_type || '.v' || event_version;
  problem text := CASE
    WHEN id IS NULL THEN 'the event has no id'
    WHEN coalesce(event_type, '') = '' THEN 'the event has no type'
    WHEN coalesce(aggregate_type, '') = '' OR coalesce(aggregate_id, '') = ''
      THEN 'the event has no aggregate: give its type and its id, which a new object of an ORM has once it is flushed'
    WHEN payload IS NULL THEN 'the event has no payload'
    WHEN occurred_at IS NULL THEN 'the event has no time'
    WHEN occurred_at < '0001-01-01 00:00:00+00' THEN format('the time %s is before the year 1', occurred_at)
    WHEN coalesce(event_version, 0) NOT BETWEEN 1 AND 999999999
      THEN format('the version %s is not a number from 1 to 999999999', coalesce(event_version::text, 'null'))
    WHEN context = 'cmd' THEN 'the context cannot be ''cmd'': commands of every context begin with that word'
    WHEN coalesce(context, '') !~ '^[a-z][a-z0-9_]*$' OR length(context) > 64
      THEN format('the context %L is not snake_case of at most 64 characters', context)
    WHEN event_type !~ '^[a-z][a-z0-9_]*$' OR length(event_type) > 64
      THEN format('the event type %L is not snake_case of at most 64 characters', event_type)
  END;
BEGIN
  IF problem IS NOT NULL THEN
    RAISE EXCEPTION 'INVALID_OUTBOX: %', problem USING ERRCODE = 'check_violation', CONSTRAINT = 'POL-047-001';
  END IF;
  PERFORM postroom.check_mesh(context, subject);
  INSERT INTO postroom.outbox_events (
    id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, correlation_id, causation_id,
    subject, traceparent
  ) VALUES (
    id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, correlation_id, causation_id,
    subject, traceparent
  );
  RETURN id;
END $$;

-- Puts a command for one worker into the outbox, as a send to `queue:<queue>` does, and returns its id, which is its
-- message id; the payload is the body that the worker gets, everything else is as with `postroom.emit`.
CREATE FUNCTION postroom.emit_command(
  context text,
  queue text,
  payload jsonb,
  aggregate_type text DEFAULT 'queue',
  aggregate_id text DEFAULT NULL,
  correlation_id uuid DEFAULT NULL,
  causation_id uuid DEFAULT NULL,
  traceparent text DEFAULT NULL,
  id uuid DEFAULT gen_random_uuid()
) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
  subject text := 'cmd.' || context || '.' || CASE cardinality(string_to_array(queue, '.'))
    WHEN 1 THEN 'default.' || queue || '.run'
    WHEN 2 THEN 'default.' || queue
    ELSE queue
  END;
  problem text := CASE
    WHEN id IS NULL THEN 'the command has no id'
    WHEN payload IS NULL THEN 'the command has no payload'
    WHEN context = 'cmd' THEN 'the context cannot be ''cmd'': commands of every context begin with that word'
    WHEN coalesce(context, '') !~ '^[a-z][a-z0-9_]*$' OR length(context) > 64
      THEN format('the context %L is not snake_case of at most 64 characters', context)
    WHEN coalesce(queue, '') !~ '^[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*){0,3}$' OR queue ~ '[^.]{65}'
      THEN format('the queue %L is not one to four words of at most 64 lower-case letters, digits, _ or -', queue)
  END;
BEGIN
  IF problem IS NOT NULL THEN
    RAISE EXCEPTION 'INVALID_OUTBOX: %', problem USING ERRCODE = 'check_violation', CONSTRAINT = 'POL-047-001';
  END IF;
  PERFORM postroom.check_mesh(context, subject);
  INSERT INTO postroom.outbox_events (
    id, aggregate_type, aggregate_id, event_type, payload, correlation_id, causation_id, subject, traceparent
  ) VALUES (
    id, aggregate_type, coalesce(aggregate_id, queue), queue, payload, correlation_id, causation_id,
    subject, traceparent
  );
  RETURN id;
END $$;

-- Has what was published under an id published again, under the next epoch: receivers that have it know it by its id. Returns
-- whether the outbox still has it.
CREATE FUNCTION postroom.emit_again(id uuid) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  UPDATE postroom.outbox_events AS event SET
    published_at = NULL, stream = NULL, stream_created_at = NULL, stream_sequence = NULL,
    epoch = event.epoch + CASE WHEN event.published_at IS NULL THEN 0 ELSE 1 END, next_attempt_at = now()
  WHERE event.id = emit_again.id;
  RETURN FOUND;
END $$;

-- The inbox of each consumer (docs/contract/delivery.md#delivery-31): what it received, how often its handler was
-- called, and what came of it.
--
-- A message is known by the context that it comes from and its id, to each consumer for itself: two that share a
-- database both want it handled. A row is in one of four states:
--
--     waiting     neither processed nor dead, without a lease: the next delivery is the next attempt
--     leased      one attempt is being made, by the owner, until `leased_until`; then somebody else may begin another
--     processed   handled: never handled again
--     dead        will not be handled; `dead_reason` and `last_error` say why
--
-- The owner is a fresh token of each claim, so that an attempt whose lease ran out settles nothing.

CREATE TABLE postroom.inbox_messages (
  consumer text COLLATE "C" NOT NULL CHECK (consumer ~ '^[A-Za-z0-9_-]+$' AND length(consumer) <= 64),
  source_context text COLLATE "C" NOT NULL CHECK (
    source_context ~ '^[a-z][a-z0-9_]*$' AND length(source_context) <= 64
  ),
  message_id text COLLATE "C" NOT NULL CHECK (message_id ~ '^[!-~]+$' AND length(message_id) <= 255),
  subject text COLLATE "C" NOT NULL,
  causation_id text COLLATE "C",  -- the message that caused it, as its header says
  received_at timestamptz NOT NULL DEFAULT now(),
  processed_at timestamptz,
  attempts integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
  last_error text,
  dead_at timestamptz,
  dead_reason text,
  owner uuid,
  begun_at timestamptz NOT NULL DEFAULT now(),  -- the latest attempt
  leased_until timestamptz,

  PRIMARY KEY (source_context, message_id, consumer),
  CONSTRAINT processed_after_it_was_received CHECK (processed_at >= received_at),
  CONSTRAINT a_dead_message_has_a_reason CHECK ((dead_at IS NULL) = (dead_reason IS NULL)),
  CONSTRAINT a_lease_has_an_owner_and_an_end CHECK ((owner IS NULL) = (leased_until IS NULL)),
  CONSTRAINT a_message_is_in_one_state CHECK (num_nonnulls(processed_at, dead_at, owner) <= 1)
) WITH (fillfactor = 80);
CREATE INDEX inbox_messages_caused ON postroom.inbox_messages (source_context, causation_id) WHERE causation_id IS NOT NULL;
CREATE INDEX idx_inbox_unprocessed ON postroom.inbox_messages (received_at) WHERE processed_at IS NULL AND dead_at IS NULL;
-- Rows lie about in the order of their receipt: what has to go is found by a coarse index, which costs nothing.
CREATE INDEX inbox_messages_received ON postroom.inbox_messages USING brin (received_at) WITH (autosummarize = on);

-- What is processed or dead stays as it is.
CREATE FUNCTION postroom.refuse_change_of_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'the message % is processed or dead and stays as it is', OLD.message_id
    USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER ended_stays BEFORE UPDATE ON postroom.inbox_messages
  FOR EACH ROW WHEN (OLD.processed_at IS NOT NULL OR OLD.dead_at IS NOT NULL)
  EXECUTE FUNCTION postroom.refuse_change_of_ended();

-- Which messages need not be published again where a stream lost them.

-- How far work queues are known to be done with, so that what is taken out of one by hand can be distinguished from what was
-- acknowledged: a work queue forgets both alike.

-- Of the messages of one stream (by its creation: a recreated stream has floors of its own) whose subject matches, all up
-- to the floor were acknowledged. A consumer's floor stays when the consumer goes.
CREATE TABLE postroom.work_queue_floors (
  stream text COLLATE "C" NOT NULL,
  stream_created_at timestamptz NOT NULL,
  filter text COLLATE "C" NOT NULL,  -- as NATS writes it
  pattern text COLLATE "C" NOT NULL,  -- as a regular expression
  floor bigint NOT NULL,
  seen_at timestamptz NOT NULL DEFAULT now(),

  PRIMARY KEY (stream, stream_created_at, filter),
  CONSTRAINT a_floor_is_a_number_of_the_stream CHECK (floor >= 0)
);

-- Which numbers of a stream were acknowledged though others before them were not: they were gone, and nothing was purged.
CREATE TABLE postroom.work_queue_holes (
  stream text COLLATE "C" NOT NULL,
  stream_created_at timestamptz NOT NULL,
  numbers int8multirange NOT NULL,

  PRIMARY KEY (stream, stream_created_at)
);

-- Whether a message of a work queue was acknowledged when that was last looked at.
CREATE FUNCTION postroom.is_settled(stream text, stream_created_at timestamptz, sequence bigint, subject text)
RETURNS boolean LANGUAGE sql STABLE
RETURN EXISTS (
  SELECT FROM postroom.work_queue_floors AS known
  WHERE known.stream = is_settled.stream AND known.stream_created_at = is_settled.stream_created_at
    AND known.floor >= is_settled.sequence AND is_settled.subject ~ known.pattern
) OR EXISTS (
  SELECT FROM postroom.work_queue_holes AS known
  WHERE known.stream = is_settled.stream AND known.stream_created_at = is_settled.stream_created_at
    AND known.numbers @> is_settled.sequence
);

-- How far each durable consumer had acknowledged a stream (by its creation) when that was last looked at: a stream that is lost
-- takes its consumers with it.
CREATE TABLE postroom.consumer_floors (
  stream text COLLATE "C" NOT NULL,
  stream_created_at timestamptz NOT NULL,
  consumer text COLLATE "C" NOT NULL,
  pattern text COLLATE "C" NOT NULL,  -- of its filters, as a regular expression
  floor bigint NOT NULL,
  seen_at timestamptz NOT NULL DEFAULT now(),

  PRIMARY KEY (stream, stream_created_at, consumer),
  CONSTRAINT a_floor_is_a_number_of_the_stream CHECK (floor >= 0)
);

-- What operators took out of the outbox because it could never be published: whole, with who did it, and why.
CREATE TABLE postroom.dropped_events (
  id uuid PRIMARY KEY,
  aggregate_type text NOT NULL,
  aggregate_id text COLLATE "C" NOT NULL,
  event_type text NOT NULL,
  event_version integer NOT NULL,
  subject text COLLATE "C" NOT NULL,
  payload jsonb NOT NULL,
  occurred_at timestamptz NOT NULL,
  correlation_id uuid,
  causation_id uuid,
  publish_attempts integer NOT NULL,
  publish_error text,
  dropped_at timestamptz NOT NULL DEFAULT now(),
  dropped_by text NOT NULL,
  reason text NOT NULL CHECK (reason <> '')
);

-- What operators took out of the deliveries because it could never be published, and why; the message itself stays in the
-- history.
CREATE TABLE postroom.dropped_deliveries (
  broker_message_id uuid NOT NULL,
  recipient_id integer NOT NULL,
  recipient text NOT NULL,
  subject text COLLATE "C" NOT NULL,
  enqueued_at timestamptz NOT NULL,
  publish_attempts integer NOT NULL,
  publish_error text,
  dropped_at timestamptz NOT NULL DEFAULT now(),
  dropped_by text NOT NULL,
  reason text NOT NULL CHECK (reason <> ''),

  PRIMARY KEY (broker_message_id, recipient_id)
);

-- What nobody could handle, whole. A letter is here before its message is acknowledged, and stays until an operator has
-- replayed or dropped it; from then on its row says who did that, and why, and its payload is gone: of a replay it is in
-- postroom.replays. The columns from `published_at` on say where its stream has it, as those of postroom.outbox_events do.
CREATE TABLE postroom.dead_letters (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  context text COLLATE "C" NOT NULL,
  letter_id text COLLATE "C" NOT NULL,  -- of the message and the consumer that buried it: one death, one letter
  subject text COLLATE "C" NOT NULL,  -- the letter's
  died_at timestamptz NOT NULL,
  letter bytea NOT NULL,  -- JSON, without the payload; bytes, for other programs' texts may hold what no text may
  payload bytea,

  act text CHECK (act <> ''),  -- what it is by the verb that settled it: replayed, dropped
  settled_at timestamptz,
  settled_by text,
  why text,

  published_at timestamptz,
  publish_attempts integer NOT NULL DEFAULT 0 CHECK (publish_attempts >= 0),
  publish_error text,
  next_attempt_at timestamptz NOT NULL DEFAULT now(),
  stream text COLLATE "C",
  stream_created_at timestamptz,
  stream_sequence bigint,
  epoch integer NOT NULL DEFAULT 0 CHECK (epoch >= 0),

  UNIQUE (letter_id, context),
  CONSTRAINT a_letter_is_settled_by_somebody CHECK (num_nonnulls(act, settled_at, settled_by, why) IN (0, 4)),
  CONSTRAINT a_letter_holds_its_message_until_it_is_settled CHECK ((payload IS NULL) = (settled_at IS NOT NULL)),
  CONSTRAINT a_place_in_a_stream_is_whole CHECK (
    num_nonnulls(stream, stream_created_at, stream_sequence) = CASE WHEN published_at IS NULL THEN 0 ELSE 3 END
  )
);
-- The id of the message that a letter is of, by the letter's own; of an id that a header cannot hold, a digest.
CREATE FUNCTION postroom.message_of_letter(letter_id text) RETURNS text LANGUAGE sql IMMUTABLE
RETURN regexp_replace(letter_id, '^dead:[^:]*:', '');

CREATE INDEX dead_letters_message ON postroom.dead_letters (context, postroom.message_of_letter(letter_id));
CREATE INDEX dead_letters_unpublished ON postroom.dead_letters (id) WHERE published_at IS NULL AND settled_at IS NULL;
CREATE INDEX dead_letters_unsettled ON postroom.dead_letters (context, died_at) WHERE settled_at IS NULL;
CREATE INDEX dead_letters_settled ON postroom.dead_letters (context, settled_at, id) WHERE settled_at IS NOT NULL;
CREATE UNIQUE INDEX dead_letters_place ON postroom.dead_letters (stream, stream_sequence, stream_created_at)
  WHERE published_at IS NOT NULL;

-- The id of the letter of a message that a consumer has buried, as `letter_id` in sdk/postroom/delivery/dead_letters has it.
CREATE FUNCTION postroom.letter_of(consumer text, message_id text) RETURNS text LANGUAGE sql STABLE
RETURN CASE
  WHEN length(consumer) + length(message_id) <= 249 THEN 'dead:' || consumer || ':' || message_id
  ELSE 'sha256:' || encode(sha256(convert_to('dead:' || consumer || ':' || message_id, 'UTF8')), 'hex')
END;

-- Whether a message was handled: a consumer has it in its inbox as processed, or as dead with its letter, and none has it as
-- waiting. A webhook waits like any other, but what it has handled says nothing of those that the message is really for.
CREATE FUNCTION postroom.is_confirmed(id text, subject text) RETURNS boolean LANGUAGE sql STABLE
RETURN (
  SELECT coalesce(
    bool_and(inbox.processed_at IS NOT NULL OR (inbox.dead_at IS NOT NULL AND EXISTS (
        SELECT FROM postroom.dead_letters WHERE letter_id = postroom.letter_of(inbox.consumer, inbox.message_id)
      )))
      AND bool_or(NOT starts_with(inbox.consumer, 'webhook__')),
    false
  )
  FROM postroom.inbox_messages AS inbox
  WHERE inbox.source_context = postroom.context_of(is_confirmed.subject)
    AND inbox.message_id = is_confirmed.id
);

-- The messages of dead letters that were replayed: nothing else has them from then on, and a stream may lose them before they
-- are handled. Another program's letters may be of one message, whose replays are one message too.
CREATE TABLE postroom.replays (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  context text COLLATE "C" NOT NULL,  -- of the letter
  message_id text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  headers bytea NOT NULL,  -- JSON, without the message's id; bytes, as a letter is
  payload bytea NOT NULL,
  replayed_at timestamptz NOT NULL DEFAULT now(),

  published_at timestamptz,
  publish_attempts integer NOT NULL DEFAULT 0 CHECK (publish_attempts >= 0),
  publish_error text,
  next_attempt_at timestamptz NOT NULL DEFAULT now(),
  stream text COLLATE "C",
  stream_created_at timestamptz,
  stream_sequence bigint,
  epoch integer NOT NULL DEFAULT 0 CHECK (epoch >= 0),

  UNIQUE (context, message_id),
  CONSTRAINT a_place_in_a_stream_is_whole CHECK (
    num_nonnulls(stream, stream_created_at, stream_sequence) = CASE WHEN published_at IS NULL THEN 0 ELSE 3 END
  )
);
CREATE INDEX replays_unpublished ON postroom.replays (id) WHERE published_at IS NULL;
CREATE INDEX replays_published ON postroom.replays USING brin (published_at) WITH (autosummarize = on);
CREATE UNIQUE INDEX replays_place ON postroom.replays (stream, stream_sequence, stream_created_at)
  WHERE published_at IS NOT NULL;

-- What operators took out of the replays because it could never be published: whole, with who did it, and why.
CREATE TABLE postroom.dropped_replays (
  id bigint PRIMARY KEY,
  context text COLLATE "C" NOT NULL,
  message_id text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  headers bytea NOT NULL,
  payload bytea NOT NULL,
  replayed_at timestamptz NOT NULL,
  publish_attempts integer NOT NULL,
  publish_error text,
  dropped_at timestamptz NOT NULL DEFAULT now(),
  dropped_by text NOT NULL,
  reason text NOT NULL CHECK (reason <> '')
);

-- What each daemon, broker and worker last reported, for operators who ask how an installation is; nothing else depends on
-- it. One address of a host is one process's: a program that was started again takes the place of the one before.
CREATE TABLE postroom.programs (
  kind text NOT NULL CHECK (kind IN ('daemon', 'broker', 'worker')),
  mesh text COLLATE "C" NOT NULL CHECK ((mesh <> '') = (kind = 'daemon')),  -- '': a program of all meshes
  name text COLLATE "C" NOT NULL,  -- of a daemon its member
  host text COLLATE "C" NOT NULL,
  pid bigint NOT NULL,
  address text,
  reported_at timestamptz NOT NULL DEFAULT now(),
  clock_seconds double precision NOT NULL,  -- by which its clock was ahead of this one
  report json NOT NULL,  -- as it came

  PRIMARY KEY (kind, mesh, name, host, pid)
);

-- Whether a program has not reported for so long, also where its last report was under a clock that was ahead.
CREATE FUNCTION postroom.is_silent(reported_at timestamptz, so_long interval) RETURNS boolean LANGUAGE sql STABLE
RETURN reported_at NOT BETWEEN now() - so_long AND now() + so_long;

-- How much the counts of all reports grew in each minute, for operators who want to see the last hour; nothing else needs it.
CREATE TABLE postroom.minute_counts (
  minute timestamptz NOT NULL,
  name text COLLATE "C" NOT NULL,
  count bigint NOT NULL,

  PRIMARY KEY (minute, name)
);

-- How many messages waited for each durable consumer that was behind, as workers saw it; nothing else depends on it.
CREATE TABLE postroom.minute_waiting (
  minute timestamptz NOT NULL,
  stream text COLLATE "C" NOT NULL,
  consumer text COLLATE "C" NOT NULL,
  waiting bigint NOT NULL,

  PRIMARY KEY (minute, stream, consumer)
);
