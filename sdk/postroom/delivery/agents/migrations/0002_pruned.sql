-- What was published long ago may be forgotten; the event itself stays.

DROP TRIGGER outgoing_stays;

CREATE TRIGGER outgoing_stays BEFORE DELETE ON outgoing WHEN OLD.published_at IS NULL
BEGIN SELECT RAISE(ABORT, 'what is not published stays known'); END;

PRAGMA user_version = 2;
