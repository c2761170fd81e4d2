-- The inbox of one daemon: one SQLite file, written by one connection (docs/contract/delivery.md#delivery-80).

CREATE TABLE inbox (
    position          INTEGER PRIMARY KEY AUTOINCREMENT,  -- grows for ever; never given twice, whatever is pruned
    mesh              TEXT    NOT NULL,
    sender            TEXT    NOT NULL,
    client_message_id TEXT    NOT NULL,
    broker_message_id TEXT    NOT NULL,
    history_id        INTEGER NOT NULL CHECK (history_id > 0),
    destination       TEXT    NOT NULL,
    received_at       INTEGER NOT NULL,                   -- ms since the epoch, like every time here
    message           BLOB    NOT NULL CHECK (length(message) > 0),  -- as the broker's history shows it, one line of JSON
    CONSTRAINT received_once UNIQUE (mesh, sender, client_message_id)
);

CREATE INDEX inbox_by_sender ON inbox (sender, position, destination);  -- which a reader may ask for too
CREATE INDEX inbox_by_destination ON inbox (destination, position);
CREATE INDEX inbox_by_age ON inbox (received_at);

CREATE TRIGGER inbox_frozen BEFORE UPDATE ON inbox
BEGIN SELECT RAISE(ABORT, 'what was received is frozen'); END;

-- Up to which history_id retention has taken messages of a mesh: what is at or below it, and not here, was here before. And up
-- to which position, which readers are told.
CREATE TABLE pruned (
    mesh       TEXT    PRIMARY KEY,
    history_id INTEGER NOT NULL CHECK (history_id > 0),
    position   INTEGER NOT NULL CHECK (position > 0)
) WITHOUT ROWID;

CREATE TRIGGER pruned_only_grows BEFORE UPDATE ON pruned
WHEN NEW.history_id < OLD.history_id OR NEW.position < OLD.position
BEGIN SELECT RAISE(ABORT, 'what was pruned stays pruned'); END;

-- The file itself. Its id is part of its durable consumer's name: what that has acked lies in this file, and no other.
CREATE TABLE inbox_file (
    only         INTEGER PRIMARY KEY CHECK (only = 1),
    id           TEXT    NOT NULL,
    created_at   INTEGER NOT NULL,
    refill_after INTEGER CHECK (refill_after >= 0)        -- history_id that a refill has come to; NULL: none is due
);

-- Its durable consumers: one for each member to whom the token has belonged.
CREATE TABLE consumers (
    name      TEXT    PRIMARY KEY,
    created   TEXT    NOT NULL,                           -- when: one that is created again counts from one
    delivered INTEGER NOT NULL DEFAULT 0 CHECK (delivered >= 0), -- number of its last delivery that is in this file
    opening   TEXT    NOT NULL,                           -- of this file: the last in which it was this consumer's
    opening_before TEXT                                   -- the one that NATS had noted then; NULL: none
) WITHOUT ROWID;

PRAGMA application_id = 1347638345;  -- "PSTI"
PRAGMA user_version = 1;
