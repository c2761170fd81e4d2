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

  CONSTRAINT chk_occurred_not_future CHECK (occurred_at <= now() + interval '1 minute'),
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
-- Rows lie about in the order of their publishing: a coarse index is enough for "since" and "before", and costs nothing.
CREATE INDEX outbox_events_published ON postroom.outbox_events USING brin (published_at) WITH (autosummarize = on);
-- A number of a stream is one event's. Two workers that mark two with the same at once would not see each other.
CREATE UNIQUE INDEX outbox_events_place ON postroom.outbox_events (stream, stream_sequence, stream_created_at)
  WHERE published_at IS NOT NULL;

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
-- Refuses with SQLSTATE 23514 and the policy as the name of the constraint: INVALID_OUTBOX without id or event type, or
-- where the two names and the version make no subject (docs/contract/delivery.md#delivery-13); FUTURE_EVENT more than a
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
    WHEN coalesce(aggregate_type, '') = '' OR coalesce(aggregate_id, '') = '' THEN 'the event has no aggregate'
    WHEN payload IS NULL THEN 'the event has no payload'
    WHEN occurred_at IS NULL THEN 'the event has no time'
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
  IF occurred_at > now() + interval '1 minute' THEN
    RAISE EXCEPTION 'FUTURE_EVENT: the event occurred at %, which is more than a minute ahead of %', occurred_at, now()
      USING ERRCODE = 'check_violation', CONSTRAINT = 'POL-047-002';
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

-- Has what was published under an id published again, under the next epoch: whoever has it knows it by its id. Returns
-- whether the outbox still has it.
CREATE FUNCTION postroom.emit_again(id uuid) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  UPDATE postroom.outbox_events AS event SET
    published_at = NULL, stream = NULL, stream_created_at = NULL, stream_sequence = NULL,
    epoch = event.epoch + CASE WHEN event.published_at IS NULL THEN 0 ELSE 1 END, next_attempt_at = now()
  WHERE event.id = emit_again.id;
  RETURN FOUND;
END $$;
