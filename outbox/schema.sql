-- The outbox of one daemon: one SQLite file, written by one connection (spec send.md, seed daemon-spec-v9 §4.5.2).
--
-- This file is the schema as it stands; migrations/ is how a file gets there. A test proves them equal.
--
-- Why it looks as it does (all measured on 1 KiB messages, four bytes of index entry cost as much as a Python call):
--   * A rowid table, its key named `seq`: rows and every index grow at their right edge, and `seq` is the age order.
--   * The seed's table with one column moved: `payload` lives in `outbox_payload`, written in the same transaction and
--     read by the claim alone. A row changes its state twice or more, its payload never: side by side, 500 rows that
--     are claimed or settled are 175 pages to write, apart 31. It costs an accept a tenth. `outbox_whole` shows both.
--   * `lane` says where a pending row waits, and is NULL for every other row, so that one narrow partial index,
--     `outbox_pending`, is the claim order, the age order and the expiry order at once. The lanes:
--       0, 1, 2   due, priority now, next, low, oldest first: what a claim takes
--       3         not due before next_attempt_at: `outbox_waiting` finds those whose time has come
--       4         held by an operator
--     `destination` stands in the index so that a claim walks past a paused destination without reading rows.
--   * Counters live in `tally`, one row, changed once per transaction.

CREATE TABLE outbox (
    seq                 INTEGER PRIMARY KEY,
    id                  TEXT    NOT NULL UNIQUE,
    client_message_id   TEXT    NOT NULL UNIQUE,
    request_fingerprint BLOB    NOT NULL CHECK (length(request_fingerprint) = 32),
    enqueued_at         INTEGER NOT NULL,                -- ms since the epoch, like every time here
    attempts            INTEGER NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    next_attempt_at     INTEGER NOT NULL,
    status              TEXT    NOT NULL DEFAULT 'pending',
    lane                INTEGER,
    priority            TEXT    NOT NULL CHECK (priority IN ('now', 'next', 'low')),
    destination         TEXT    NOT NULL,
    submitted_by        TEXT    NOT NULL,                -- uid:gid of the caller
    not_before          INTEGER,
    last_error          TEXT,                            -- "<code>: <detail>"
    delivered_at        INTEGER,
    broker_message_id   TEXT,
    history_id          INTEGER,
    duplicate           INTEGER CHECK (duplicate = 1),   -- the broker had accepted it before this answer
    unanswered_at       INTEGER,                         -- a post then got no answer: it may have been accepted
    aborted_at          INTEGER,
    aborted_by          TEXT CHECK (aborted_by IN ('operator', 'auto')),
    superseded_by       TEXT,                            -- id of the successor
    payload_pruned_at   INTEGER,
    payload_bytes       INTEGER NOT NULL CHECK (payload_bytes >= 0),
    held                INTEGER GENERATED ALWAYS AS (lane IS 4) VIRTUAL,

    -- What each state has, and has not. A status that is none of the five fails too.
    CONSTRAINT state CHECK (
        CASE status
        WHEN 'pending'  THEN lane IS NOT NULL AND lane BETWEEN 0 AND 4
                             AND coalesce(delivered_at, broker_message_id, duplicate, aborted_at, superseded_by,
                                          payload_pruned_at) IS NULL
        WHEN 'inflight' THEN coalesce(lane, delivered_at, broker_message_id, duplicate, aborted_at, superseded_by,
                                      payload_pruned_at) IS NULL
        WHEN 'done'     THEN delivered_at IS NOT NULL AND broker_message_id IS NOT NULL
                             AND coalesce(lane, unanswered_at, aborted_at, superseded_by) IS NULL
        WHEN 'dead'     THEN last_error IS NOT NULL
                             AND coalesce(lane, delivered_at, broker_message_id, duplicate, aborted_at, superseded_by,
                                          payload_pruned_at) IS NULL
        WHEN 'aborted'  THEN aborted_at IS NOT NULL AND aborted_by IS NOT NULL
                             AND coalesce(lane, delivered_at, broker_message_id, duplicate) IS NULL
        ELSE 0 END
    ),
    CONSTRAINT pruned CHECK (payload_pruned_at IS NULL OR payload_bytes = 0),
    -- Checked at the end of the transaction: no row without its payload.
    FOREIGN KEY (seq) REFERENCES outbox_payload (seq) DEFERRABLE INITIALLY DEFERRED
);

CREATE TABLE outbox_payload (
    seq     INTEGER PRIMARY KEY,
    payload BLOB    NOT NULL                             -- an encoded envelope; empty once pruned
);

CREATE INDEX outbox_pending ON outbox (lane, seq, destination) WHERE lane IS NOT NULL;
CREATE INDEX outbox_waiting ON outbox (next_attempt_at) WHERE lane = 3;
CREATE INDEX outbox_by_status ON outbox (status) WHERE status IN ('inflight', 'dead', 'aborted');
CREATE INDEX outbox_predecessor ON outbox (superseded_by) WHERE superseded_by IS NOT NULL;

-- The state machine (outbox/model.py: TRANSITIONS). AFTER and CASE, not BEFORE and IN: half the time of a claim.
CREATE TRIGGER outbox_transition AFTER UPDATE OF status ON outbox
WHEN CASE OLD.status
     WHEN 'pending'  THEN NEW.status NOT IN ('inflight', 'dead') AND NEW.status NOT IN ('aborted', 'done')
     WHEN 'inflight' THEN NEW.status NOT IN ('done', 'dead') AND NEW.status <> 'pending'
     WHEN 'dead'     THEN NEW.status NOT IN ('aborted', 'done')
     ELSE 1 END
BEGIN SELECT RAISE(ABORT, 'the outbox has no such transition'); END;

-- An id is never released, and what was accepted never changes.
CREATE TRIGGER outbox_keeps_rows BEFORE DELETE ON outbox
BEGIN SELECT RAISE(ABORT, 'an outbox row is never deleted'); END;

CREATE TRIGGER outbox_frozen
BEFORE UPDATE OF seq, id, client_message_id, request_fingerprint, enqueued_at, priority, destination, submitted_by,
                 not_before ON outbox
BEGIN SELECT RAISE(ABORT, 'what was accepted is frozen'); END;

CREATE TRIGGER outbox_payload_bytes_frozen BEFORE UPDATE OF payload_bytes ON outbox
WHEN NEW.payload_pruned_at IS NULL OR OLD.payload_pruned_at IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'a payload only changes by being pruned'); END;

CREATE TRIGGER outbox_payload_frozen BEFORE UPDATE ON outbox_payload
WHEN NEW.seq <> OLD.seq OR NEW.payload <> x''
     OR NOT EXISTS (SELECT 1 FROM outbox WHERE seq = OLD.seq AND payload_pruned_at IS NOT NULL)
BEGIN SELECT RAISE(ABORT, 'a payload only changes by being pruned'); END;

CREATE TRIGGER outbox_keeps_payloads BEFORE DELETE ON outbox_payload
BEGIN SELECT RAISE(ABORT, 'an outbox row is never deleted'); END;

-- One row: how many rows are in each state, and the bytes of their payloads.
CREATE TABLE tally (
    only          INTEGER PRIMARY KEY CHECK (only = 1),
    pending       INTEGER NOT NULL CHECK (pending >= 0),
    inflight      INTEGER NOT NULL CHECK (inflight >= 0),
    done          INTEGER NOT NULL CHECK (done >= 0),
    dead          INTEGER NOT NULL CHECK (dead >= 0),
    aborted       INTEGER NOT NULL CHECK (aborted >= 0),
    payload_bytes INTEGER NOT NULL CHECK (payload_bytes >= 0)
);
INSERT INTO tally VALUES (1, 0, 0, 0, 0, 0, 0);

-- Who did what to which row, when and why.
CREATE TABLE operator_log (
    seq    INTEGER PRIMARY KEY,
    at     INTEGER NOT NULL,
    verb   TEXT    NOT NULL,
    actor  TEXT    NOT NULL,
    reason TEXT    NOT NULL CHECK (length(trim(reason)) > 0),
    row_id TEXT,
    detail TEXT
);
CREATE INDEX operator_log_row ON operator_log (row_id) WHERE row_id IS NOT NULL;

CREATE TRIGGER operator_log_append_only_update BEFORE UPDATE ON operator_log
BEGIN SELECT RAISE(ABORT, 'the operator log is append-only'); END;

CREATE TRIGGER operator_log_append_only_delete BEFORE DELETE ON operator_log
BEGIN SELECT RAISE(ABORT, 'the operator log is append-only'); END;

-- What an operator told the relay: destination '' is everything.
CREATE TABLE relay_control (
    destination     TEXT    PRIMARY KEY,
    paused          INTEGER NOT NULL CHECK (paused IN (0, 1)),
    rate_per_second REAL    CHECK (rate_per_second > 0)
) WITHOUT ROWID;

-- The seed's table in one piece, for a look into the file by hand.
CREATE VIEW outbox_whole AS SELECT * FROM outbox JOIN outbox_payload USING (seq);

-- A row as readers decode it (outbox/rows.py: StoredRow), never with its payload.
CREATE VIEW outbox_row AS
SELECT seq, id, client_message_id, status, destination, last_error, enqueued_at, held, superseded_by,
       json_array(id, client_message_id, status, destination, priority, enqueued_at, attempts, next_attempt_at,
                  lower(hex(substr(request_fingerprint, 1, 8))), payload_bytes, held, not_before, last_error,
                  delivered_at, broker_message_id, history_id, aborted_at, aborted_by, superseded_by,
                  payload_pruned_at, submitted_by, duplicate, unanswered_at) AS stored
FROM outbox;

PRAGMA application_id = 1347638354;  -- "PSTR"
PRAGMA user_version = 1;
