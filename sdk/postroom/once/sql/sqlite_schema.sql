-- The idempotency registry of one host, version 1: one file, written by any number of processes.
--
-- Times are ms since the epoch. `consumer_group` is '' for the scope of the producer.

CREATE TABLE idempotency_keys (
    tenant         TEXT    NOT NULL CHECK (length(tenant) <= 255),
    topic          TEXT    NOT NULL CHECK (length(topic) <= 255),
    consumer_group TEXT    NOT NULL CHECK (length(consumer_group) <= 255),
    key            TEXT    NOT NULL CHECK (length(key) BETWEEN 1 AND 512),
    state          TEXT    NOT NULL,
    owner          TEXT    NOT NULL CHECK (owner <> ''),       -- who holds it, or settled it: the fence
    attempts       INTEGER NOT NULL CHECK (attempts >= 1),
    begun_at       INTEGER NOT NULL,
    lease_until    INTEGER,
    settled_at     INTEGER,
    last_error     TEXT CHECK (length(last_error) <= 2000),
    encoding       TEXT CHECK (encoding IN ('json', 'bytes')), -- of the result
    result         BLOB CHECK (length(result) <= 1048576),
    PRIMARY KEY (tenant, topic, consumer_group, key),

    -- What each state has, and has not. A state that is none of the three fails too.
    CONSTRAINT state CHECK (
        CASE state
        WHEN 'PENDING'   THEN lease_until IS NOT NULL AND coalesce(settled_at, encoding, result) IS NULL
        WHEN 'COMMITTED' THEN lease_until IS NULL AND settled_at IS NOT NULL
                              AND encoding IS NOT NULL AND result IS NOT NULL
        WHEN 'FAILED'    THEN lease_until IS NULL AND settled_at IS NOT NULL AND last_error IS NOT NULL
                              AND coalesce(encoding, result) IS NULL
        ELSE 0 END
    )
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_keys_ended ON idempotency_keys (coalesce(lease_until, settled_at));

-- What operators did to keys. A key that is forgotten leaves nothing else.
CREATE TABLE operator_log (
    id             INTEGER PRIMARY KEY,
    at             INTEGER NOT NULL,
    verb           TEXT    NOT NULL CHECK (verb IN ('forget')),
    actor          TEXT    NOT NULL,
    reason         TEXT    NOT NULL,
    tenant         TEXT    NOT NULL,
    topic          TEXT    NOT NULL,
    consumer_group TEXT    NOT NULL,
    key            TEXT    NOT NULL,
    state          TEXT    NOT NULL, -- that the key had
    attempts       INTEGER NOT NULL
) STRICT;

CREATE INDEX operator_log_key ON operator_log (tenant, topic, consumer_group, key);

CREATE TRIGGER idempotency_keys_begin BEFORE INSERT ON idempotency_keys
WHEN NEW.state <> 'PENDING'
BEGIN
    SELECT raise(ABORT, 'no such transition');
END;

CREATE TRIGGER idempotency_keys_move BEFORE UPDATE ON idempotency_keys
WHEN (OLD.state || ' ' || NEW.state)
        NOT IN ('PENDING PENDING', 'PENDING COMMITTED', 'PENDING FAILED', 'FAILED PENDING')
    OR (NEW.state <> 'PENDING' AND NEW.owner <> OLD.owner)                                      -- only its owner settles
    OR (NEW.state = 'PENDING' AND NEW.owner <> OLD.owner AND NEW.attempts <> OLD.attempts + 1)  -- taken over: counted
BEGIN
    SELECT raise(ABORT, 'no such transition');
END;

PRAGMA application_id = 1347637839;  -- "PSRO"
PRAGMA user_version = 1;
