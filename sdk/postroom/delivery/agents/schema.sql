-- The event store of one agent: one SQLite file (docs/contract/delivery.md#delivery-55).
--
--   * `event` never changes. `record` is canonical JSON (sdk/postroom/delivery/agents/store.py), and the other columns but the hash
--     are read out of it, so that nothing next to it can say something else.
--   * A message that came in is one event (role handled, conflict or refused), found by its idempotency key. What goes
--     out because of it follows in the same transaction: what the agent emitted, and what the runtime reported.
--   * `outgoing` is what becomes of an event or a dead letter that goes out: where JetStream has it, until it is lost and
--     goes out again.

CREATE TABLE event (
    position     INTEGER PRIMARY KEY,                    -- 1, 2, 3, … without a gap
    record       TEXT    NOT NULL,
    state_hash   BLOB    NOT NULL CHECK (length(state_hash) = 32),

    role            TEXT    GENERATED ALWAYS AS (record ->> '$.role') VIRTUAL
                            CHECK (role IS NOT NULL
                                   AND role IN ('handled', 'conflict', 'refused', 'emitted', 'reported')),
    cause           INTEGER GENERATED ALWAYS AS (record ->> '$.cause') VIRTUAL
                            CHECK ((cause IS NOT NULL) = (role IN ('emitted', 'reported'))
                                   AND coalesce(cause < position, TRUE)),
    tenant          TEXT    GENERATED ALWAYS AS (record ->> '$.envelope.tenant') VIRTUAL,
    workspace       TEXT    GENERATED ALWAYS AS (record ->> '$.envelope.workspace') VIRTUAL,
    idempotency_key TEXT    GENERATED ALWAYS AS (record ->> '$.envelope.idempotency_key') VIRTUAL
                            CHECK (length(idempotency_key) > 0)
);

-- What makes a second delivery harmless: one event for each message, whatever id or attempt it comes under.
CREATE UNIQUE INDEX event_input ON event (idempotency_key, workspace, tenant) WHERE cause IS NULL;

CREATE TRIGGER event_without_gap BEFORE INSERT ON event
WHEN NEW.position IS NOT (SELECT coalesce(max(position), 0) + 1 FROM event)
BEGIN SELECT RAISE(ABORT, 'an event has the next position'); END;

CREATE TRIGGER event_append_only_delete BEFORE DELETE ON event
BEGIN SELECT RAISE(ABORT, 'the event store is append-only'); END;

CREATE TRIGGER event_append_only_update BEFORE UPDATE ON event
BEGIN SELECT RAISE(ABORT, 'the event store is append-only'); END;

-- The events that go out. A comparison with the streams deletes the place of what is no longer of interest, and
-- the row from what was published so long ago that it would not be published again.
CREATE TABLE outgoing (
    position          INTEGER PRIMARY KEY,               -- the event's
    cause             INTEGER NOT NULL,                  -- the position of the message that caused it
    epoch             INTEGER NOT NULL DEFAULT 0,        -- how often it was lost
    published_at      INTEGER,                           -- ms since the epoch; NULL: not yet, or lost
    stream            TEXT,                              -- where it is
    stream_created_at INTEGER,                           -- µs since the epoch
    stream_sequence   INTEGER,
    CONSTRAINT a_place_is_whole CHECK (
        (stream IS NULL) = (stream_created_at IS NULL) AND (stream IS NULL) = (stream_sequence IS NULL)
    ),
    CONSTRAINT only_what_is_published_has_a_place CHECK (stream IS NULL OR published_at IS NOT NULL)
);

CREATE INDEX outgoing_unpublished ON outgoing (cause) WHERE published_at IS NULL;
CREATE INDEX outgoing_place ON outgoing (stream, stream_created_at, stream_sequence) WHERE stream IS NOT NULL;

CREATE TRIGGER event_goes_out AFTER INSERT ON event WHEN NEW.cause IS NOT NULL
BEGIN INSERT INTO outgoing (position, cause) VALUES (NEW.position, NEW.cause); END;

CREATE TRIGGER outgoing_stays BEFORE DELETE ON outgoing WHEN OLD.published_at IS NULL
BEGIN SELECT RAISE(ABORT, 'what is not published stays known'); END;

CREATE TRIGGER outgoing_is_published_until_it_is_lost BEFORE UPDATE ON outgoing
WHEN NEW.position <> OLD.position OR NEW.cause <> OLD.cause
     OR NEW.epoch <> OLD.epoch + (OLD.published_at IS NOT NULL AND NEW.published_at IS NULL)
     OR (OLD.published_at IS NOT NULL AND coalesce(NEW.published_at <> OLD.published_at, FALSE))
BEGIN SELECT RAISE(ABORT, 'a published event stays published until it is lost, and then begins another epoch'); END;

-- What the agent could not handle, whole: a letter is here before its message is acknowledged, and goes out as events do.
-- Its position is negative: -1, -2, …, so that it never is an event's.
CREATE TABLE letter (
    position  INTEGER PRIMARY KEY CHECK (position < 0),
    letter_id TEXT    NOT NULL UNIQUE,                   -- of the message and the consumer: one death, one letter
    subject   TEXT    NOT NULL,
    record    BLOB    NOT NULL                           -- JSON
);

CREATE TRIGGER letter_stays AFTER UPDATE ON letter
BEGIN SELECT RAISE(ABORT, 'a dead letter stays as it is'); END;

CREATE TRIGGER letter_goes_out AFTER INSERT ON letter
BEGIN INSERT INTO outgoing (position, cause) VALUES (NEW.position, NEW.position); END;

CREATE TRIGGER letter_goes AFTER DELETE ON outgoing WHEN OLD.position < 0
BEGIN DELETE FROM letter WHERE position = OLD.position; END;

-- Whose store this is, and the position of its state: the last event's, written in that event's transaction.
CREATE TABLE state (
    only          INTEGER PRIMARY KEY CHECK (only = 1),
    agent         TEXT    NOT NULL,
    tenant        TEXT    NOT NULL,
    workspace     TEXT    NOT NULL,
    position      INTEGER NOT NULL CHECK (position >= 0),
    state_hash    BLOB    NOT NULL CHECK (length(state_hash) = 32),
    logical_clock INTEGER NOT NULL                       -- µs since the epoch: the latest time that any event had
);

CREATE TRIGGER state_stays BEFORE DELETE ON state
BEGIN SELECT RAISE(ABORT, 'a store keeps its state'); END;

CREATE TRIGGER state_owner_frozen BEFORE UPDATE OF only, agent, tenant, workspace ON state
BEGIN SELECT RAISE(ABORT, 'a store stays with its agent'); END;

CREATE TRIGGER state_follows_the_events BEFORE UPDATE OF position, state_hash ON state
WHEN NEW.position <= OLD.position
     OR NOT EXISTS (SELECT 1 FROM event WHERE position = NEW.position AND state_hash = NEW.state_hash)
     OR NEW.position < (SELECT max(position) FROM event)
BEGIN SELECT RAISE(ABORT, 'the state stands at the last event'); END;

-- How often each entity was changed: what `expected_version` is compared with.
CREATE TABLE entity (
    id      TEXT    PRIMARY KEY,
    version INTEGER NOT NULL CHECK (version >= 1)
) WITHOUT ROWID;

CREATE TRIGGER entity_version_grows BEFORE UPDATE ON entity
WHEN NEW.id <> OLD.id OR NEW.version <= OLD.version
BEGIN SELECT RAISE(ABORT, 'a version only grows'); END;

CREATE TRIGGER entity_stays BEFORE DELETE ON entity
BEGIN SELECT RAISE(ABORT, 'an entity keeps its version'); END;

-- Failed attempts at messages, and why the last one failed. A row goes when its message was handled, or after 30 days.
CREATE TABLE attempt (
    message_id TEXT    PRIMARY KEY,
    attempts   INTEGER NOT NULL CHECK (attempts >= 1),
    last_error TEXT    NOT NULL,
    failed_at  INTEGER NOT NULL                          -- ms since the epoch
) WITHOUT ROWID;

CREATE INDEX attempt_age ON attempt (failed_at);

CREATE TRIGGER attempt_counts_on BEFORE UPDATE ON attempt
WHEN NEW.message_id <> OLD.message_id OR NEW.attempts <= OLD.attempts
BEGIN SELECT RAISE(ABORT, 'attempts only grow'); END;

-- What operators changed, by whom as the operating system says it; a row is written in the transaction of its change.
CREATE TABLE operator_log (
    seq     INTEGER PRIMARY KEY,
    at      INTEGER NOT NULL,                            -- ms since the epoch
    actor   TEXT    NOT NULL,
    verb    TEXT    NOT NULL,
    subject TEXT    NOT NULL,
    reason  TEXT    NOT NULL
);

CREATE TRIGGER operator_log_append_only_update BEFORE UPDATE ON operator_log
BEGIN SELECT RAISE(ABORT, 'the operator log takes additions only'); END;

CREATE TRIGGER operator_log_append_only_delete BEFORE DELETE ON operator_log
BEGIN SELECT RAISE(ABORT, 'the operator log takes additions only'); END;

PRAGMA application_id = 1347633477;  -- "PSAE"
PRAGMA user_version = 1;
