-- Everything that the accept transaction writes, and the meshes, members, topics and queues that it checks against.
--
-- What one accept writes is docs/contract/accept.md#accept-14; the event outbox is in a schema of its own. Ids that a
-- caller or an operator sees are text or uuid; the small integers stay inside. The tables that take a row per message
-- have no foreign keys: the accept statement holds the rows it refers to with share locks, which is one lock per
-- distinct destination instead of one check per message, and the orphan check proves the result.

CREATE SCHEMA mesh;

-- Which database this is ------------------------------------------------------------------------------------------------

-- A backup that is restored, or a standby that is promoted, may be older than the database that its readers and writers
-- knew. So each has an incarnation: a new one begins where the database lies somewhere else than it did (another cluster,
-- another database, another timeline of the write-ahead log), and where an operator says so. `history_floor` is above
-- every history_id that was ever given out before, also by what is lost: it follows from the clock (seconds since 1970
-- times 2^21), which is more numbers than any mesh gives out meanwhile, and below 2^53 until the year 2106.
CREATE TABLE mesh.incarnation (
  history_floor bigint PRIMARY KEY CHECK (history_floor >= 0),
  id uuid NOT NULL UNIQUE DEFAULT gen_random_uuid(),
  place text,
  reason text NOT NULL,
  began_at timestamptz NOT NULL DEFAULT now()
);

-- Who and where ------------------------------------------------------------------------------------------------------

CREATE TABLE mesh.mesh (
  id integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
  slug text COLLATE "C" NOT NULL UNIQUE CHECK (slug ~ '^[a-z][a-z0-9_]{0,63}$' AND slug <> 'cmd'),
  created_at timestamptz NOT NULL DEFAULT now()
);

-- The numbers that a mesh skipped when an incarnation began: what was given out of them is lost. A reader that stands
-- between the two has read what is no longer there.
CREATE TABLE mesh.history_gap (
  mesh_id integer NOT NULL REFERENCES mesh.mesh ON DELETE CASCADE,
  last_before bigint NOT NULL CHECK (last_before >= 0),
  history_floor bigint NOT NULL REFERENCES mesh.incarnation,
  PRIMARY KEY (mesh_id, history_floor),
  CHECK (last_before < history_floor)
);

-- The stretches of numbers between the gaps: above `after`, up to `up_to`.
CREATE VIEW mesh.history_stretch AS
SELECT mesh_id, after,
  lead(last_before, 1, 9223372036854775807) OVER (PARTITION BY mesh_id ORDER BY after) AS up_to
FROM (
  SELECT id AS mesh_id, 0::bigint AS after, 0::bigint AS last_before FROM mesh.mesh
  UNION ALL SELECT mesh_id, history_floor, last_before FROM mesh.history_gap
) AS beginning;

-- A revoked member keeps its row, and so its name, for ever: nobody else may become the reader of its messages.
CREATE TABLE mesh.member (
  id integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
  mesh_id integer NOT NULL REFERENCES mesh.mesh ON DELETE CASCADE,
  name text COLLATE "C" NOT NULL CHECK (name ~ '^[a-z][a-z0-9_-]{0,63}$'),
  role text NOT NULL CHECK (role IN ('member', 'admin')),
  token_sha256 bytea UNIQUE CHECK (octet_length(token_sha256) = 32),
  old_token_sha256 bytea UNIQUE CHECK (octet_length(old_token_sha256) = 32),  -- as good, until it is retired
  created_at timestamptz NOT NULL DEFAULT now(),
  revoked_at timestamptz,
  UNIQUE (mesh_id, name),
  CONSTRAINT a_revoked_member_has_no_token CHECK ((revoked_at IS NULL) = (token_sha256 IS NOT NULL)),
  CONSTRAINT who_has_an_old_token_has_a_new_one CHECK (old_token_sha256 IS NULL OR token_sha256 IS NOT NULL)
);

-- Who operates the broker with a token of their own: one mesh, or every mesh. A revoked operator keeps its row, and so its
-- name in the log; `administrator` is the one whose token is in a file.
CREATE TABLE mesh.operator (
  id integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
  mesh_id integer REFERENCES mesh.mesh ON DELETE CASCADE,
  name text COLLATE "C" NOT NULL UNIQUE CHECK (name ~ '^[a-z][a-z0-9_-]{0,63}$' AND name <> 'administrator'),
  role text NOT NULL CHECK (role IN ('look', 'repair', 'administer')),
  token_sha256 bytea UNIQUE CHECK (octet_length(token_sha256) = 32),
  created_at timestamptz NOT NULL DEFAULT now(),
  revoked_at timestamptz,
  CONSTRAINT a_revoked_operator_has_no_token CHECK ((revoked_at IS NULL) = (token_sha256 IS NOT NULL))
);

CREATE TABLE mesh.topic (
  id integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
  mesh_id integer NOT NULL REFERENCES mesh.mesh ON DELETE CASCADE,
  name text COLLATE "C" NOT NULL CHECK (name ~ '^[a-z][a-z0-9_]{0,63}$'),
  created_at timestamptz NOT NULL DEFAULT now(),
  UNIQUE (mesh_id, name)
);

CREATE TABLE mesh.topic_subscription (
  topic_id integer NOT NULL REFERENCES mesh.topic ON DELETE CASCADE,
  member_id integer NOT NULL REFERENCES mesh.member ON DELETE CASCADE,
  created_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (topic_id, member_id)
);
CREATE INDEX topic_subscription_member ON mesh.topic_subscription (member_id);

-- Where the messages of a topic are posted to. The secret is kept as it is, since the worker signs with it; no route of
-- the broker reads it back. The url was checked by the broker, and each connection to it is checked again.
CREATE TABLE mesh.webhook (
  id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
  topic_id integer NOT NULL REFERENCES mesh.topic ON DELETE CASCADE,
  url text NOT NULL CHECK (url ~ '^https?://[!-~]+$' AND length(url) <= 2048),
  secret text NOT NULL CHECK (length(secret) BETWEEN 32 AND 128),
  created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX webhook_topic ON mesh.webhook (topic_id);

CREATE TABLE mesh.queue (
  id integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
  mesh_id integer NOT NULL REFERENCES mesh.mesh ON DELETE CASCADE,
  name text COLLATE "C" NOT NULL CHECK (name ~ '^[a-z][a-z0-9_-]{0,63}(\.[a-z][a-z0-9_-]{0,63}){0,3}$'),
  created_at timestamptz NOT NULL DEFAULT now(),
  UNIQUE (mesh_id, name)
);

-- What one accept writes, all of it or nothing -----------------------------------------------------------------------

-- Exists exactly for the messages that committed. An id is the whole mesh's, and belongs to the sender that used it
-- first. With history_available = false it is the tombstone of a message that retention deleted; expires_at is null
-- where the broker recognises ids for ever.
CREATE TABLE mesh.client_message_dedupe (
  mesh_id integer NOT NULL,
  client_message_id text COLLATE "C" NOT NULL CHECK (length(client_message_id) BETWEEN 1 AND 128),
  sender_id integer NOT NULL,
  broker_message_id uuid NOT NULL,
  history_id bigint NOT NULL CHECK (history_id > 0),
  request_fingerprint bytea NOT NULL CHECK (octet_length(request_fingerprint) = 32),
  destination_kind text NOT NULL CHECK (destination_kind IN ('topic', 'dm', 'queue')),
  destination_ref text NOT NULL,
  first_seen_at timestamptz NOT NULL DEFAULT now(),
  history_available boolean NOT NULL DEFAULT true,
  expires_at timestamptz CHECK (expires_at > first_seen_at),
  PRIMARY KEY (mesh_id, client_message_id)
);
CREATE INDEX client_message_dedupe_expiry ON mesh.client_message_dedupe (expires_at);

CREATE TABLE mesh.topic_message (
  broker_message_id uuid PRIMARY KEY,
  mesh_id integer NOT NULL,
  history_id bigint NOT NULL,
  client_message_id text COLLATE "C" NOT NULL,
  sender_id integer NOT NULL,
  topic_id integer NOT NULL,
  priority text NOT NULL CHECK (priority IN ('now', 'next', 'low')),
  reply_to text,
  traceparent text,
  meta jsonb,
  body bytea NOT NULL,
  body_is_text boolean NOT NULL,
  accepted_at timestamptz NOT NULL DEFAULT now()
);

-- Messages for one receiver: a member (dm) or whichever worker takes it (queue).
CREATE TABLE mesh.message_queue (
  broker_message_id uuid PRIMARY KEY,
  mesh_id integer NOT NULL,
  history_id bigint NOT NULL,
  client_message_id text COLLATE "C" NOT NULL,
  sender_id integer NOT NULL,
  recipient_id integer,
  queue_id integer,
  priority text NOT NULL CHECK (priority IN ('now', 'next', 'low')),
  reply_to text,
  traceparent text,
  meta jsonb,
  body bytea NOT NULL,
  body_is_text boolean NOT NULL,
  accepted_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT a_member_or_a_queue CHECK (num_nonnulls(recipient_id, queue_id) = 1)
);

-- The order of a mesh. Numbers are given out in the order of the transactions that take them, not in that of the commits
-- (see `take_history_ids`). Some may be missing: of messages that were refused, and of a batch that lost its ids to
-- another one or was rolled back.
CREATE TABLE mesh.message_history (
  mesh_id integer NOT NULL,
  history_id bigint NOT NULL CHECK (history_id > 0),
  broker_message_id uuid NOT NULL,
  client_message_id text COLLATE "C" NOT NULL,
  sender_id integer NOT NULL,
  destination_kind text NOT NULL CHECK (destination_kind IN ('topic', 'dm', 'queue')),
  destination_id integer NOT NULL,
  destination_ref text NOT NULL,
  recipients integer NOT NULL CHECK (recipients >= 0),
  accepted_at timestamptz NOT NULL DEFAULT now(),
  expires_at timestamptz NOT NULL CHECK (expires_at > accepted_at),
  PRIMARY KEY (mesh_id, history_id)
);
CREATE INDEX message_history_expiry ON mesh.message_history (expires_at);
CREATE INDEX message_history_time ON mesh.message_history (mesh_id, accepted_at, history_id);

-- How far each deletion of messages reached, for a reader that asks whether it has missed some. A reader that began after
-- the deletion `id` and stands at a number has lost messages where a later deletion went beyond that number. So a row that
-- is both older and lower than another says nothing any more, and goes: one row a mesh, unless its retention was shortened.
-- By `last_accepted_at` a reader knows the days of which messages are missing.
CREATE TABLE mesh.history_deletion (
  id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
  mesh_id integer NOT NULL REFERENCES mesh.mesh ON DELETE CASCADE,
  last_history_id bigint NOT NULL,
  last_accepted_at timestamptz NOT NULL,
  deleted_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX history_deletion_reach ON mesh.history_deletion (mesh_id, last_history_id);

-- One row per recipient, published in the order of history_id; what its columns mean is said at postroom.outbox_events.
CREATE TABLE mesh.delivery_queue (
  broker_message_id uuid NOT NULL,
  recipient_id integer NOT NULL,
  mesh_id integer NOT NULL,
  enqueued_at timestamptz NOT NULL DEFAULT now(),
  published_at timestamptz,
  publish_attempts integer NOT NULL DEFAULT 0 CHECK (publish_attempts >= 0),
  publish_error text,
  history_id bigint NOT NULL,
  next_attempt_at timestamptz NOT NULL DEFAULT now(),
  stream text COLLATE "C",
  stream_created_at timestamptz,
  stream_sequence bigint,
  epoch integer NOT NULL DEFAULT 0 CHECK (epoch >= 0),
  PRIMARY KEY (broker_message_id, recipient_id),
  CONSTRAINT a_place_in_a_stream_is_whole CHECK (
    num_nonnulls(stream, stream_created_at, stream_sequence) = CASE WHEN published_at IS NULL THEN 0 ELSE 3 END
  )
);
CREATE INDEX delivery_queue_order ON mesh.delivery_queue (recipient_id, history_id) WHERE published_at IS NULL;
-- Rows lie about in the order of their publishing, as those of postroom.outbox_events do.
CREATE INDEX delivery_queue_published ON mesh.delivery_queue USING brin (published_at) WITH (autosummarize = on);
-- A number of a stream is one delivery's. Two workers that mark two with the same at once would not see each other.
CREATE UNIQUE INDEX delivery_queue_place ON mesh.delivery_queue (stream, stream_sequence, stream_created_at)
  WHERE published_at IS NOT NULL;

-- Mentions are names, as the sender wrote them; whether a member of that name exists is the reader's to ask.
CREATE TABLE mesh.mention_index (
  broker_message_id uuid NOT NULL,
  mentioned text COLLATE "C" NOT NULL,
  mesh_id integer NOT NULL,
  history_id bigint NOT NULL,
  PRIMARY KEY (broker_message_id, mentioned)
);
CREATE INDEX mention_index_by_member ON mesh.mention_index (mesh_id, mentioned, history_id);

-- The subject on which a member's daemons are given its messages.
CREATE FUNCTION mesh.inbox_subject(member_id integer) RETURNS text LANGUAGE sql STABLE
RETURN (
  SELECT mesh.slug || '.inbox.' || member.name
  FROM mesh.member JOIN mesh.mesh ON mesh.id = member.mesh_id WHERE member.id = inbox_subject.member_id
);

-- A committed message as its readers see it, whatever kind of destination it has.
CREATE VIEW mesh.message AS
SELECT history.mesh_id, history.history_id, history.broker_message_id, history.client_message_id,
  mesh.slug AS mesh, history.sender_id, sender.name AS sender,
  history.destination_kind, history.destination_id, history.destination_ref,
  history.accepted_at, dedupe.request_fingerprint,
  coalesce(topic_message.priority, message_queue.priority) AS priority,
  coalesce(topic_message.reply_to, message_queue.reply_to) AS reply_to,
  coalesce(topic_message.traceparent, message_queue.traceparent) AS traceparent,
  coalesce(topic_message.meta, message_queue.meta) AS meta,
  coalesce(topic_message.body, message_queue.body) AS body,
  coalesce(topic_message.body_is_text, message_queue.body_is_text) AS body_is_text
FROM mesh.message_history AS history
JOIN mesh.mesh ON mesh.id = history.mesh_id
JOIN mesh.member AS sender ON sender.id = history.sender_id
JOIN mesh.client_message_dedupe AS dedupe
  ON dedupe.mesh_id = history.mesh_id AND dedupe.client_message_id = history.client_message_id
LEFT JOIN mesh.topic_message
  ON topic_message.broker_message_id = history.broker_message_id AND history.destination_kind = 'topic'
LEFT JOIN mesh.message_queue
  ON message_queue.broker_message_id = history.broker_message_id AND history.destination_kind <> 'topic';

-- What the last check for orphans found, whichever program ran it: the only row.
CREATE TABLE mesh.orphan_check (
  only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
  checked_at timestamptz NOT NULL,
  violations jsonb NOT NULL
);

-- What operators changed: by whom, as the token says; what they did to which thing, why, and what came of it. A row is written
-- in the transaction of its change.
CREATE TABLE mesh.operator_log (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  actor text NOT NULL,  -- `administrator`, an operator's name, a member as `bob of sea`, or a user as `alice as postroom`
  verb text NOT NULL,
  noun text NOT NULL,
  key text NOT NULL,  -- names and ids, with the mesh first where the thing has one
  outcome text NOT NULL,
  reason text  -- where the verb asks for one
);
CREATE INDEX operator_log_key ON mesh.operator_log USING hash (key);  -- a key may be longer than a tree takes
CREATE INDEX operator_log_time ON mesh.operator_log USING brin (at) WITH (autosummarize = on);

-- Rows of daemons that died or were retired, as their daemons reported them: their last word on a message that may never have
-- come here (docs/contract/operate.md#operate-64).
CREATE TABLE mesh.ended_row (
  row_id text COLLATE "C" NOT NULL,
  member_id integer NOT NULL REFERENCES mesh.member ON DELETE CASCADE,
  mesh_id integer NOT NULL REFERENCES mesh.mesh ON DELETE CASCADE,
  client_message_id text COLLATE "C" NOT NULL,
  successor text COLLATE "C",  -- the client_message_id of the row that superseded it
  host text NOT NULL,
  report text NOT NULL,  -- JSON: EndedRow of sdk/postroom/_wire/sends.py
  reported_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (row_id, member_id)
);
CREATE INDEX ended_row_message ON mesh.ended_row (mesh_id, client_message_id);
CREATE INDEX ended_row_successor ON mesh.ended_row (mesh_id, successor) WHERE successor IS NOT NULL;
CREATE INDEX ended_row_age ON mesh.ended_row (reported_at);
CREATE INDEX ended_row_of_member ON mesh.ended_row (member_id, reported_at, row_id);

-- What may change afterwards -----------------------------------------------------------------------------------------

CREATE FUNCTION mesh.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '%.% is written once: rows are only inserted, and deleted by retention', TG_TABLE_SCHEMA, TG_TABLE_NAME
    USING ERRCODE = 'restrict_violation';
END $$;

CREATE TRIGGER operator_log_is_append_only BEFORE UPDATE OR DELETE ON mesh.operator_log
  FOR EACH ROW EXECUTE FUNCTION mesh.refuse_change();

CREATE TRIGGER written_once BEFORE UPDATE ON mesh.topic_message FOR EACH ROW EXECUTE FUNCTION mesh.refuse_change();
CREATE TRIGGER written_once BEFORE UPDATE ON mesh.message_queue FOR EACH ROW EXECUTE FUNCTION mesh.refuse_change();
CREATE TRIGGER written_once BEFORE UPDATE ON mesh.message_history FOR EACH ROW EXECUTE FUNCTION mesh.refuse_change();
CREATE TRIGGER written_once BEFORE UPDATE ON mesh.mention_index FOR EACH ROW EXECUTE FUNCTION mesh.refuse_change();

CREATE FUNCTION mesh.note_deletion() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  DELETE FROM mesh.history_deletion AS earlier
  USING (SELECT mesh_id, max(history_id) AS last FROM deleted GROUP BY mesh_id) AS reach
  WHERE earlier.mesh_id = reach.mesh_id AND earlier.last_history_id <= reach.last;
  INSERT INTO mesh.history_deletion (mesh_id, last_history_id, last_accepted_at)
  SELECT mesh_id, max(history_id), max(accepted_at) FROM deleted GROUP BY mesh_id ORDER BY mesh_id;
  RETURN NULL;
END $$;

CREATE TRIGGER note_deletion AFTER DELETE ON mesh.message_history REFERENCING OLD TABLE AS deleted
  FOR EACH STATEMENT EXECUTE FUNCTION mesh.note_deletion();

-- An id stays bound to its message: the one change a dedupe row knows is becoming a tombstone.
CREATE FUNCTION mesh.refuse_rebinding() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  allowed mesh.client_message_dedupe := OLD;
BEGIN
  allowed.history_available := false;
  IF NEW IS DISTINCT FROM allowed THEN
    RAISE EXCEPTION 'the id % stays bound to its message', OLD.client_message_id USING ERRCODE = 'restrict_violation';
  END IF;
  RETURN NEW;
END $$;

CREATE TRIGGER bound_for_good BEFORE UPDATE ON mesh.client_message_dedupe
  FOR EACH ROW EXECUTE FUNCTION mesh.refuse_rebinding();

-- The numbers of the history ----------------------------------------------------------------------------------------------

-- Each mesh has a sequence, mesh.history_<id>: a number that was taken stays taken, whatever becomes of the transaction,
-- so that accepts of one mesh need not wait for each other's commits. The functions have their owner's rights: an
-- accept or a reader needs none on sequences that come and go.
CREATE FUNCTION mesh.last_history_id(mesh_id integer) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN pg_sequence_last_value(to_regclass('mesh.history_' || mesh_id));
EXCEPTION WHEN internal_error THEN  -- between the two, a transaction committed that deletes the mesh
  RETURN NULL;
END $$;

-- Where the numbers of a deleted mesh ended.
CREATE TABLE mesh.ended_history (
  slug text COLLATE "C" PRIMARY KEY,
  last_history_id bigint NOT NULL
);

-- A mesh counts from the incarnation's floor, since before a restore there may have been another mesh of its name, and goes
-- on above a deleted one of its name, whose readers may stand there.
CREATE FUNCTION mesh.begin_history() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  floor bigint;
BEGIN
  SELECT history_floor INTO floor FROM mesh.incarnation ORDER BY history_floor DESC LIMIT 1 FOR SHARE;
  EXECUTE format('CREATE SEQUENCE IF NOT EXISTS mesh.history_%s MINVALUE 0', NEW.id);
  PERFORM setval('mesh.history_' || NEW.id, greatest(
    floor, (SELECT last_history_id FROM mesh.ended_history WHERE slug = NEW.slug)
  ));
  INSERT INTO mesh.history_gap (mesh_id, last_before, history_floor) SELECT NEW.id, 0, floor WHERE floor > 0;
  RETURN NULL;
END $$;

CREATE TRIGGER begin_history AFTER INSERT ON mesh.mesh FOR EACH ROW EXECUTE FUNCTION mesh.begin_history();

CREATE FUNCTION mesh.end_history() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  INSERT INTO mesh.ended_history VALUES (OLD.slug, mesh.last_history_id(OLD.id))
  ON CONFLICT (slug) DO UPDATE SET last_history_id = excluded.last_history_id;
  EXECUTE format('DROP SEQUENCE IF EXISTS mesh.history_%s', OLD.id);
  RETURN NULL;
END $$;

CREATE TRIGGER end_history AFTER DELETE ON mesh.mesh FOR EACH ROW EXECUTE FUNCTION mesh.end_history();

-- Takes numbers for so many messages, and returns the one before the first; null where the mesh is gone.
--
-- Of two transactions the one with the lower id gets the lower numbers, so that a reader who knows the oldest one that has not
-- ended knows which numbers may still come. For that a lock of the mesh covers both, the transaction's id and its numbers,
-- and nothing else: it goes at the end of the inner block, with the savepoint, also where the statement is cancelled. The
-- transaction may not have an id before, so the call comes before any row is locked or written. The other lock is a mark
-- that stays until the end, for `history_horizon`.
CREATE FUNCTION mesh.take_history_ids(mesh_id integer, messages integer) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  before bigint;
BEGIN
  IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
    RAISE EXCEPTION 'the transaction has an id already: it may be older than numbers that are taken';
  END IF;
  PERFORM pg_advisory_xact_lock_shared(hashtext('postroom.history'), mesh_id);
  BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('postroom.history.numbers'), mesh_id);
    PERFORM pg_current_xact_id();
    before := mesh.last_history_id(mesh_id);
    PERFORM setval(to_regclass('mesh.history_' || mesh_id), before + messages);
    RAISE SQLSTATE 'PR001';
  EXCEPTION WHEN SQLSTATE 'PR001' THEN
    RETURN before;
  END;
END $$;

-- How far the histories of meshes are complete for a snapshot that is taken afterwards: up to `last_history_id`, but for
-- what was written by the transaction `oldest` or a later one; null where none is under way. On a standby no locks show
-- which transactions accept, so every one that has not ended counts.
CREATE FUNCTION mesh.history_horizon(meshes integer[])
RETURNS TABLE (mesh_id integer, last_history_id bigint, oldest xid) LANGUAGE plpgsql AS $$
DECLARE
  -- Before the locks are read: later transactions take higher ones.
  numbers bigint[] := ARRAY(SELECT mesh.last_history_id(id) FROM unnest(meshes) WITH ORDINALITY AS known (id, n) ORDER BY n);
BEGIN
  IF pg_is_in_recovery() THEN
    RETURN QUERY SELECT id, number, pg_snapshot_xmin(pg_current_snapshot())::xid
    FROM unnest(meshes, numbers) AS known (id, number);
    RETURN;
  END IF;
  RETURN QUERY WITH held AS MATERIALIZED (
    SELECT * FROM pg_locks WHERE granted AND locktype IN ('advisory', 'transactionid')
  )
  SELECT id, number, (
    SELECT writing.transactionid
    FROM held AS mark JOIN held AS writing USING (virtualtransaction)
    WHERE mark.locktype = 'advisory' AND mark.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND mark.classid::bigint = hashtext('postroom.history')::bigint & 4294967295 AND mark.objid = id
      AND mark.objsubid = 2 AND mark.mode = 'ShareLock'
      AND writing.locktype = 'transactionid' AND writing.mode = 'ExclusiveLock'
    ORDER BY age(writing.transactionid) DESC LIMIT 1
  )
  FROM unnest(meshes, numbers) AS known (id, number);
END $$;

-- Which incarnation it is --------------------------------------------------------------------------------------------------

-- Where the database lies: its cluster, its number there, its timeline. Null where the role may not know.
CREATE FUNCTION mesh.place() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  RETURN (SELECT system_identifier FROM pg_control_system())
    || '/' || (SELECT oid FROM pg_database WHERE datname = current_database())
    || '/' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8);
EXCEPTION WHEN insufficient_privilege THEN
  RETURN NULL;
END $$;

-- Begins an incarnation, and lets every mesh go on above all numbers that were ever given out; returns its id. It waits
-- for the accepts that are under way, and others wait for it. What was there before is taken from the rows, since a backup
-- may have a sequence that is ahead of them.
CREATE FUNCTION mesh.begin_incarnation(why text) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
  fresh mesh.incarnation;
BEGIN
  LOCK TABLE mesh.incarnation IN EXCLUSIVE MODE;
  LOCK TABLE mesh.client_message_dedupe IN SHARE MODE;
  INSERT INTO mesh.incarnation (history_floor, place, reason)
  SELECT greatest(
      floor(extract(epoch FROM clock_timestamp()))::bigint << 21,
      (SELECT max(history_floor) + 1 FROM mesh.incarnation), (SELECT max(mesh.last_history_id(id)) FROM mesh.mesh)
    ), mesh.place(), why
  RETURNING * INTO fresh;
  INSERT INTO mesh.history_gap (mesh_id, last_before, history_floor)
  SELECT mesh.id, stand.last, fresh.history_floor
  FROM mesh.mesh CROSS JOIN LATERAL (
    SELECT greatest(
      0, (SELECT max(history_id) FROM mesh.message_history AS history WHERE history.mesh_id = mesh.id),
      (SELECT max(last_history_id) FROM mesh.history_deletion AS deletion WHERE deletion.mesh_id = mesh.id),
      (SELECT max(history_floor) FROM mesh.history_gap AS gap WHERE gap.mesh_id = mesh.id)
    ) AS last
  ) AS stand
  WHERE stand.last < fresh.history_floor;
  PERFORM setval('mesh.history_' || id, fresh.history_floor) FROM mesh.mesh;  -- last: it stays, whatever becomes of the rest
  RETURN fresh.id;
END $$;

-- The incarnation's id; a new one where the database lies elsewhere than when this one began. A standby does not say: its
-- connections outlive its promotion, and would go on with the old one's numbers.
CREATE FUNCTION mesh.current_incarnation() RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
  latest mesh.incarnation;
BEGIN
  IF pg_is_in_recovery() THEN
    RAISE EXCEPTION 'the database is a standby' USING ERRCODE = 'cannot_connect_now';
  END IF;
  SELECT * INTO latest FROM mesh.incarnation ORDER BY history_floor DESC LIMIT 1;
  IF mesh.place() IS NOT DISTINCT FROM coalesce(latest.place, mesh.place()) THEN
    RETURN latest.id;
  END IF;
  LOCK TABLE mesh.incarnation IN EXCLUSIVE MODE;
  SELECT * INTO latest FROM mesh.incarnation ORDER BY history_floor DESC LIMIT 1;
  IF mesh.place() = latest.place THEN
    RETURN latest.id;
  END IF;
  RETURN mesh.begin_incarnation('the database lay at ' || latest.place || ' before');
END $$;

INSERT INTO mesh.incarnation (history_floor, place, reason) VALUES (0, mesh.place(), 'the database was made');
