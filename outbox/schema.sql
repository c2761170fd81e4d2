-- The outbox of one daemon: one SQLite file, written by one connection (docs/contract/send.md#send-41).
--
-- Why it looks as it does (all measured on 1 KiB messages, four bytes of index entry cost as much as a Python call):
--   * A rowid table, its key named `seq`: rows and every index grow at their right edge, and `seq` is the age order.
--   * The columns are those of docs/contract/send.md#send-50. `payload` lives in `outbox_payload`, written in the same
--     transaction and read by the claim alone. A row changes its state twice or more, its payload never: side by side,
--     500 rows that are claimed or settled are 175 pages to write, apart 31. It costs an accept a tenth. `outbox_whole`
--     shows both.
--   * What is done or aborted moves to `outbox_settled` when its payload goes: both of its rows leave whole pages behind
--     for new ones, however small the payloads are, and what an id needs to stay used is 140 bytes (outbox/settled.py).
--     The newest row of all stays where it is: numbers go on from it.
--   * `lane` says where a pending row waits, and is NULL for every other row, so that one narrow partial index,
--     `outbox_pending`, is the claim order, the age order and the expiry order at once. The lanes:
--       0, 1, 2   due, priority now, next, low, oldest first: what a claim takes (`due_lane` says which of them)
--       3         not due before next_attempt_at: `outbox_waiting` finds those whose time has come
--       4         held by an operator
--     `destination` is in the index so that a claim walks past a paused destination without reading rows.
--   * Counters live in `tally`, one row, changed once per transaction; `room` is what a row takes in the file.

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
    payload_bytes       INTEGER NOT NULL CHECK (payload_bytes >= 0),
    resent_at           INTEGER,                         -- an operator had it sent again then, since the broker had lost it
    age_from            INTEGER GENERATED ALWAYS AS (max(enqueued_at, coalesce(not_before, 0), coalesce(resent_at, 0))) VIRTUAL,
    due_lane            INTEGER GENERATED ALWAYS AS (CASE priority WHEN 'now' THEN 0 WHEN 'next' THEN 1 ELSE 2 END) VIRTUAL,
    held                INTEGER GENERATED ALWAYS AS (lane IS 4) VIRTUAL,
    -- Bytes of the file (outbox/transaction.py: room_of): the row and its index entries, its share of a page of payloads, further pages.
    room                INTEGER GENERATED ALWAYS AS (
        320 + CASE WHEN payload_bytes <= 4061 THEN 4096 / (4088 / (payload_bytes + 10))
                   ELSE (payload_bytes + 30) / 4092 * 4096
                        + 4096 / (4088 / (499 + iif((payload_bytes - 489) % 4092 <= 3572,
                                                    (payload_bytes - 489) % 4092, 0))) END
    ) VIRTUAL,

    -- What each state has, and has not. A status that is none of the five fails too.
    CONSTRAINT state CHECK (
        CASE status
        WHEN 'pending'  THEN lane IS NOT NULL AND lane BETWEEN 0 AND 4
                             AND coalesce(delivered_at, broker_message_id, duplicate, aborted_at, superseded_by)
                                 IS NULL
        WHEN 'inflight' THEN coalesce(lane, delivered_at, broker_message_id, duplicate, aborted_at, superseded_by)
                             IS NULL
        WHEN 'done'     THEN delivered_at IS NOT NULL AND broker_message_id IS NOT NULL
                             AND coalesce(lane, unanswered_at, aborted_at, superseded_by) IS NULL
        WHEN 'dead'     THEN last_error IS NOT NULL
                             AND coalesce(lane, delivered_at, broker_message_id, duplicate, aborted_at, superseded_by)
                                 IS NULL
        WHEN 'aborted'  THEN aborted_at IS NOT NULL AND aborted_by IS NOT NULL
                             AND coalesce(lane, delivered_at, broker_message_id, duplicate) IS NULL
        ELSE 0 END
    ),
    -- Checked at the end of the transaction: no row without its payload.
    FOREIGN KEY (seq) REFERENCES outbox_payload (seq) DEFERRABLE INITIALLY DEFERRED
);

CREATE TABLE outbox_payload (
    seq     INTEGER PRIMARY KEY,
    payload BLOB    NOT NULL                             -- an encoded envelope
);

CREATE INDEX outbox_pending ON outbox (lane, seq, destination) WHERE lane IS NOT NULL;
CREATE INDEX outbox_waiting ON outbox (next_attempt_at) WHERE lane = 3;
CREATE INDEX outbox_by_status ON outbox (status) WHERE status IN ('inflight', 'done', 'dead', 'aborted');
CREATE INDEX outbox_predecessor ON outbox (superseded_by) WHERE superseded_by IS NOT NULL;

-- The state machine (docs/outbox-states.md). AFTER and CASE, not BEFORE and IN: half the time of a claim.
CREATE TRIGGER outbox_transition AFTER UPDATE OF status ON outbox
WHEN CASE OLD.status
     WHEN 'pending'  THEN NEW.status NOT IN ('inflight', 'dead') AND NEW.status NOT IN ('aborted', 'done')
     WHEN 'inflight' THEN NEW.status NOT IN ('done', 'dead') AND NEW.status <> 'pending'
     WHEN 'dead'     THEN NEW.status NOT IN ('aborted', 'done')
     WHEN 'done'     THEN NEW.status <> 'pending' OR NOT EXISTS (SELECT 1 FROM outbox_missing WHERE seq = NEW.seq)
     ELSE 1 END
BEGIN SELECT RAISE(ABORT, 'the outbox has no such transition'); END;

-- An id is never released, and what was accepted never changes: a row only leaves for `outbox_settled`.
CREATE TRIGGER outbox_keeps_rows BEFORE DELETE ON outbox
WHEN NOT EXISTS (SELECT 1 FROM outbox_settled
                 WHERE seq = OLD.seq AND request_fingerprint = OLD.request_fingerprint
                   AND OLD.status IN ('done', 'aborted'))
BEGIN SELECT RAISE(ABORT, 'an outbox row is never deleted'); END;

CREATE TRIGGER outbox_frozen
BEFORE UPDATE OF seq, id, client_message_id, request_fingerprint, enqueued_at, priority, destination, submitted_by,
                 not_before, payload_bytes ON outbox
BEGIN SELECT RAISE(ABORT, 'what was accepted is frozen'); END;

CREATE TRIGGER outbox_payload_frozen BEFORE UPDATE ON outbox_payload
BEGIN SELECT RAISE(ABORT, 'a payload only changes by being pruned'); END;

CREATE TRIGGER outbox_keeps_payloads BEFORE DELETE ON outbox_payload
WHEN NOT EXISTS (SELECT 1 FROM outbox_settled WHERE seq = OLD.seq)
BEGIN SELECT RAISE(ABORT, 'an outbox row is never deleted'); END;

-- What is kept of a done or aborted row whose payload is gone: its id, its fingerprint, its outcome. ULIDs and UUIDs
-- are packed into bytes. An id is found by `outbox_settled_key`, whose keys are near each other for ids that follow one
-- another, so that a thousand new ones are a few pages to write; `salt` keeps callers from choosing ids with one key.
CREATE TABLE outbox_settled (
    seq                 INTEGER PRIMARY KEY,             -- the one it had in `outbox`
    id                  BLOB    NOT NULL,
    client_message_id   BLOB    NOT NULL,
    request_fingerprint BLOB    NOT NULL CHECK (length(request_fingerprint) = 32),
    common              INTEGER NOT NULL REFERENCES outbox_common (number),
    attempts            INTEGER NOT NULL,
    enqueued_at         INTEGER NOT NULL,
    settled_after       INTEGER NOT NULL,                -- ms from enqueued_at
    pruned_after        INTEGER NOT NULL,                -- ms from then
    not_before          INTEGER,
    broker_message_id   BLOB,
    history_id          INTEGER,
    duplicate           INTEGER,
    unanswered_at       INTEGER,
    aborted_by          TEXT CHECK (aborted_by IN ('operator', 'auto')),  -- NULL: it is done
    superseded_by       INTEGER,                         -- seq of the successor
    checksum            INTEGER NOT NULL,                -- of all these, so that a recovery knows whether it is whole
    CONSTRAINT outcome CHECK (CASE WHEN aborted_by IS NULL THEN broker_message_id IS NOT NULL AND superseded_by IS NULL
                                   ELSE coalesce(broker_message_id, history_id, duplicate) IS NULL END)
);
CREATE INDEX outbox_settled_predecessor ON outbox_settled (superseded_by) WHERE superseded_by IS NOT NULL;

CREATE TABLE outbox_settled_key (
    key INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (key, seq)
) WITHOUT ROWID;

CREATE TABLE outbox_salt (salt BLOB NOT NULL);
INSERT INTO outbox_salt VALUES (randomblob(8));

-- What many settled rows share, once.
CREATE TABLE outbox_common (
    number       INTEGER PRIMARY KEY,
    destination  TEXT NOT NULL,
    priority     TEXT NOT NULL,
    submitted_by TEXT NOT NULL,
    last_error   TEXT NOT NULL,                          -- its code, '' for none; only of aborted rows
    UNIQUE (destination, priority, submitted_by, last_error)
);

CREATE TRIGGER outbox_settled_frozen BEFORE UPDATE ON outbox_settled
BEGIN SELECT RAISE(ABORT, 'what was settled is frozen'); END;

CREATE TRIGGER outbox_keeps_settled BEFORE DELETE ON outbox_settled
BEGIN SELECT RAISE(ABORT, 'an outbox row is never deleted'); END;

-- One row: how many rows are in each state, how many of them moved to `outbox_settled`, the bytes of the payloads, and
-- the room of the others: of those that wait (pending, inflight, dead), and of those that are kept for a while.
CREATE TABLE tally (
    only          INTEGER PRIMARY KEY CHECK (only = 1),
    pending       INTEGER NOT NULL CHECK (pending >= 0),
    inflight      INTEGER NOT NULL CHECK (inflight >= 0),
    done          INTEGER NOT NULL CHECK (done >= 0),
    dead          INTEGER NOT NULL CHECK (dead >= 0),
    aborted       INTEGER NOT NULL CHECK (aborted >= 0),
    payload_bytes INTEGER NOT NULL CHECK (payload_bytes >= 0),
    moved         INTEGER NOT NULL CHECK (moved >= 0),
    waiting_room  INTEGER NOT NULL CHECK (waiting_room >= 0),
    kept_room     INTEGER NOT NULL CHECK (kept_room >= 0)
);
INSERT INTO tally VALUES (1, 0, 0, 0, 0, 0, 0, 0, 0, 0);

-- The incarnation of the broker's database that the done rows were last compared with, or are being: those settled from
-- `since` on, up to the row `until`; `after` is the last row that was compared.
CREATE TABLE comparison (
    only        INTEGER PRIMARY KEY CHECK (only = 1),
    incarnation TEXT    NOT NULL,
    since       INTEGER NOT NULL,
    after       INTEGER NOT NULL,
    until       INTEGER NOT NULL,
    CHECK (after <= until)
);

-- The done rows that this database does not have.
CREATE TABLE outbox_missing (
    seq INTEGER PRIMARY KEY
);

-- The last posts of a row that the broker did not accept, as a JSON array, the oldest first: when it began, how many ms
-- it took, the code of the answer or of the failure, and the broker's address. Posts that failed alike one after another
-- are one entry, with the time of the first and their number, so that a busy broker costs a row no more than a few bytes.
-- At most 20 entries; a row that is accepted at its first post has none, and what they take goes when the row moves.
CREATE TABLE outbox_failed_posts (
    seq   INTEGER PRIMARY KEY,
    posts TEXT    NOT NULL
);

-- The rows whose end the broker has not heard of yet, in the order in which they ended: died, were retired by an operator, or
-- turned out to be accepted after that.
CREATE TABLE outbox_unreported (
    number INTEGER PRIMARY KEY,
    seq    INTEGER NOT NULL UNIQUE ON CONFLICT REPLACE
);

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

-- What `postroom outbox recover` saved. While something is missing that nobody accepted, the daemon does not start.
CREATE TABLE outbox_recovery (
    at          INTEGER PRIMARY KEY,
    saved       INTEGER NOT NULL,
    missing     INTEGER,                                 -- NULL: unknown
    buried      INTEGER NOT NULL,                        -- of those: their ids stay used
    accepted_at INTEGER,
    accepted_by TEXT
);

-- What an operator ordered the relay to do: destination '' is everything.
CREATE TABLE relay_control (
    destination     TEXT    PRIMARY KEY,
    paused          INTEGER NOT NULL CHECK (paused IN (0, 1)),
    rate_per_second REAL    CHECK (rate_per_second > 0)
) WITHOUT ROWID;

-- A row in one piece (docs/contract/send.md#send-50), for a look into the file by hand.
CREATE VIEW outbox_whole AS
SELECT seq, id, client_message_id, request_fingerprint, payload, enqueued_at, attempts, next_attempt_at, status,
       last_error, delivered_at, broker_message_id, history_id, aborted_at, aborted_by, superseded_by, priority,
       destination, submitted_by, not_before, NULL AS payload_pruned_at
FROM outbox JOIN outbox_payload USING (seq)
UNION ALL
SELECT seq, id, client_message_id, request_fingerprint, x'', enqueued_at, attempts, enqueued_at,
       iif(aborted_by IS NULL, 'done', 'aborted'), nullif(last_error, ''),
       iif(aborted_by IS NULL, enqueued_at + settled_after, NULL), broker_message_id, history_id,
       iif(aborted_by IS NULL, NULL, enqueued_at + settled_after), aborted_by, superseded_by, priority,
       destination, submitted_by, not_before, enqueued_at + settled_after + pruned_after
FROM outbox_settled JOIN outbox_common ON number = common;

-- A row as readers decode it (postroom/_wire/sends.py: OutboxRow), times in seconds; never with its payload.
CREATE VIEW outbox_row AS
SELECT seq, id, client_message_id, status, destination, last_error, enqueued_at, held,
       json_object('id', id, 'client_message_id', client_message_id, 'status', status, 'destination', destination,
                   'priority', priority, 'enqueued_at', enqueued_at / 1000.0, 'attempts', attempts,
                   'next_attempt_at', next_attempt_at / 1000.0,
                   'request_fingerprint', lower(hex(substr(request_fingerprint, 1, 8))),
                   'payload_bytes', payload_bytes, 'held', held, 'not_before', not_before / 1000.0,
                   'last_error', last_error, 'delivered_at', delivered_at / 1000.0,
                   'broker_message_id', broker_message_id, 'history_id', history_id,
                   'duplicate', coalesce(duplicate, 0), 'unanswered_at', unanswered_at / 1000.0,
                   'aborted_at', aborted_at / 1000.0, 'aborted_by', aborted_by, 'superseded_by', superseded_by,
                   'submitted_by', submitted_by) AS stored
FROM outbox;

-- The same of what was moved; '#' begins what is packed.
CREATE VIEW outbox_settled_row AS
SELECT seq, status, destination, last_error, enqueued_at, 0 AS held,
       json_object('id', CASE typeof(id) WHEN 'blob' THEN '#' || hex(id) ELSE id END,
                   'client_message_id', CASE typeof(client_message_id) WHEN 'blob' THEN '#' || hex(client_message_id)
                                                                       ELSE client_message_id END,
                   'status', status, 'destination', destination, 'priority', priority,
                   'enqueued_at', enqueued_at / 1000.0, 'attempts', attempts, 'next_attempt_at', settled_at / 1000.0,
                   'request_fingerprint', lower(hex(substr(request_fingerprint, 1, 8))),
                   'payload_bytes', 0, 'not_before', not_before / 1000.0, 'last_error', last_error,
                   'delivered_at', iif(status = 'done', settled_at / 1000.0, NULL),
                   'broker_message_id', CASE typeof(broker_message_id) WHEN 'blob' THEN '#' || hex(broker_message_id)
                                                                       ELSE broker_message_id END,
                   'history_id', history_id, 'duplicate', coalesce(duplicate, 0),
                   'unanswered_at', unanswered_at / 1000.0,
                   'aborted_at', iif(status = 'aborted', settled_at / 1000.0, NULL), 'aborted_by', aborted_by,
                   'superseded_by',
                   coalesce((SELECT outbox.id FROM outbox WHERE outbox.seq = moved.superseded_by),
                            (SELECT CASE typeof(later.id) WHEN 'blob' THEN '#' || hex(later.id) ELSE later.id END
                             FROM outbox_settled AS later WHERE later.seq = moved.superseded_by)),
                   'payload_pruned_at', (settled_at + pruned_after) / 1000.0, 'submitted_by', submitted_by) AS stored
FROM (SELECT outbox_settled.*, destination, priority, submitted_by, nullif(last_error, '') AS last_error,
             iif(aborted_by IS NULL, 'done', 'aborted') AS status, enqueued_at + settled_after AS settled_at
      FROM outbox_settled JOIN outbox_common ON number = common) AS moved;

PRAGMA application_id = 1347638354;  -- "PSTR"
PRAGMA user_version = 1;
