-- name: pragmas
-- The new file is nobody's yet: one sync at the end is enough.
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
PRAGMA foreign_keys = ON;

-- name: schema
-- Where each table and each index begins, which of them is a table with rowids, and how many columns its records have.
SELECT name, rootpage, type = 'table' AND name NOT IN ('relay_control', 'outbox_settled_key'),
       (SELECT count(*) FROM pragma_table_xinfo(object.name) AS columns WHERE columns.hidden = 0)
FROM sqlite_schema AS object WHERE rootpage > 0;

-- name: trigger
-- How a trigger was made.
SELECT sql FROM sqlite_schema WHERE name = ?;

-- name: drop_trigger
-- Let messages go whose rows are not found.
DROP TRIGGER outbox_keeps_payloads;

-- name: create_indexed
-- What the damaged file's indexes of ids say of each number, and whether the entry is where it should be.
CREATE TEMP TABLE indexed (
    seq INTEGER PRIMARY KEY, name TEXT, id TEXT, sound_name INTEGER NOT NULL DEFAULT 0,
    sound_id INTEGER NOT NULL DEFAULT 0
);

-- name: indexed_name
-- Note the client_message_id of a number.
INSERT INTO indexed (seq, name, sound_name) VALUES (:seq, :text, :sound)
ON CONFLICT (seq) DO UPDATE SET name = coalesce(name, excluded.name), sound_name = excluded.sound_name;

-- name: indexed_id
-- Note the id of a number.
INSERT INTO indexed (seq, id, sound_id) VALUES (:seq, :text, :sound)
ON CONFLICT (seq) DO UPDATE SET id = coalesce(id, excluded.id), sound_id = excluded.sound_id;

-- name: indexed
-- What the indexes say of a number.
SELECT name, id, sound_name, sound_id FROM indexed WHERE seq = ?;

-- name: indexed_by_id
-- The number of a row.
SELECT seq FROM indexed WHERE id = ?;

-- name: indexed_and_lost
-- The ids of numbers that the new file has no row of, the oldest first.
SELECT seq, name, id FROM indexed
WHERE name IS NOT NULL AND NOT EXISTS (SELECT 1 FROM outbox WHERE outbox.seq = indexed.seq)
  AND NOT EXISTS (SELECT 1 FROM outbox_settled WHERE outbox_settled.seq = indexed.seq)
ORDER BY seq;

-- name: id_before
-- The id of the last row before a number.
SELECT id FROM (
    SELECT * FROM (SELECT seq, id FROM outbox WHERE seq < :seq ORDER BY seq DESC LIMIT 1) UNION ALL
    SELECT * FROM (SELECT seq, id FROM outbox_settled WHERE seq < :seq ORDER BY seq DESC LIMIT 1)
) ORDER BY seq DESC LIMIT 1;

-- name: is_kept
-- Whether the new file has a number, or a client_message_id of a row that was not moved.
SELECT EXISTS (SELECT 1 FROM outbox WHERE seq = :seq) OR EXISTS (SELECT 1 FROM outbox_settled WHERE seq = :seq)
       OR EXISTS (SELECT 1 FROM outbox WHERE client_message_id = :client_message_id);

-- name: keep_payload
-- Write the message of a row into the new file.
INSERT INTO outbox_payload (seq, payload) VALUES (?, ?) ON CONFLICT DO NOTHING;

-- name: payload
-- The message of a row.
SELECT payload FROM outbox_payload WHERE seq = ?;

-- name: drop_payloads_without_row
-- What is left of rows that are moved, or lost.
DELETE FROM outbox_payload WHERE NOT EXISTS (SELECT 1 FROM outbox WHERE outbox.seq = outbox_payload.seq);

-- name: keep
-- Write a row into the new file.
INSERT INTO outbox (seq, id, client_message_id, request_fingerprint, enqueued_at, attempts, next_attempt_at, status,
                    lane, priority, destination, submitted_by, not_before, last_error, delivered_at, broker_message_id,
                    history_id, duplicate, unanswered_at, aborted_at, aborted_by, superseded_by, payload_bytes, resent_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: keep_failed_posts
-- Write what is known of the failed posts of a row into the new file, if that has the row.
INSERT INTO outbox_failed_posts (seq, posts)
SELECT :seq, :posts WHERE EXISTS (SELECT 1 FROM outbox WHERE outbox.seq = :seq)
ON CONFLICT DO NOTHING;

-- name: keep_log_line
-- Write a line of the operator log into the new file, unless damage has left one that no operator can have made.
INSERT OR IGNORE INTO operator_log (seq, at, verb, actor, reason, row_id, detail) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: log_lines
-- How many lines there are.
SELECT count(*) FROM operator_log;

-- name: keep_control
-- Write operators' settings of the relay into the new file, except invalid ones.
INSERT OR IGNORE INTO relay_control (destination, paused, rate_per_second) VALUES (?, ?, ?);

-- name: keep_recovery
-- Note what a recovery saved, and what was missing.
INSERT INTO outbox_recovery (at, saved, missing, buried, accepted_at, accepted_by) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING;

-- name: report_again
-- Which of the rows that ended the broker had heard of is not known any more.
INSERT INTO outbox_unreported (seq) SELECT seq FROM outbox WHERE status IN ('dead', 'aborted') ORDER BY seq;

-- name: recount
-- Count the rows of the new file, once.
UPDATE tally SET (pending, inflight, done, dead, aborted) = (
    SELECT count(*) FILTER (WHERE status = 'pending'), count(*) FILTER (WHERE status = 'inflight'),
           count(*) FILTER (WHERE status = 'done'), count(*) FILTER (WHERE status = 'dead'),
           count(*) FILTER (WHERE status = 'aborted')
    FROM (SELECT status FROM outbox UNION ALL SELECT iif(aborted_by IS NULL, 'done', 'aborted') FROM outbox_settled)
), (payload_bytes, waiting_room, kept_room) = (
    SELECT coalesce(sum(payload_bytes), 0), coalesce(sum(room) FILTER (WHERE status NOT IN ('done', 'aborted')), 0),
           coalesce(sum(room) FILTER (WHERE status IN ('done', 'aborted')), 0)
    FROM outbox
), moved = (SELECT count(*) FROM outbox_settled);

-- name: unaccepted
-- Whether something was lost that nobody has accepted yet: how much at most, NULL where that is unknown.
SELECT count(*), CASE WHEN count(*) = count(missing) THEN sum(missing) END
FROM outbox_recovery WHERE missing IS NOT 0 AND accepted_at IS NULL;

-- name: accept
-- Note who accepted what was lost.
UPDATE outbox_recovery SET accepted_at = :now, accepted_by = :actor WHERE missing IS NOT 0 AND accepted_at IS NULL;
