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

PRAGMA user_version = 3;
