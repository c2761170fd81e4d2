-- name: pragmas
-- The new file is nobody's yet: one sync at the end is enough.
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
PRAGMA foreign_keys = ON;

-- name: last_seq
-- The largest seq that any sound part of the damaged file knows.
SELECT max(seq) FROM outbox;

-- name: last_seq_in_index
-- The same from the index of the ids, where the table does not answer.
SELECT max(seq) FROM outbox INDEXED BY sqlite_autoindex_outbox_2;

-- name: rows
-- The rows of a stretch of the damaged file, each with its payload.
SELECT seq, id, client_message_id, request_fingerprint, enqueued_at, attempts, next_attempt_at, status, lane, priority,
       destination, submitted_by, not_before, last_error, delivered_at, broker_message_id, history_id, duplicate,
       unanswered_at, aborted_at, aborted_by, superseded_by, length(payload), payload
FROM outbox JOIN outbox_payload USING (seq) WHERE seq BETWEEN ? AND ?;

-- name: ids
-- The client_message_ids that the damaged file's index still knows, also of rows that cannot be read.
SELECT client_message_id FROM outbox INDEXED BY sqlite_autoindex_outbox_2 ORDER BY client_message_id;

-- name: ids_backwards
-- The same from the other end.
SELECT client_message_id FROM outbox INDEXED BY sqlite_autoindex_outbox_2 ORDER BY client_message_id DESC;

-- name: keep
-- Write a row into the new file.
INSERT INTO outbox (seq, id, client_message_id, request_fingerprint, enqueued_at, attempts, next_attempt_at, status,
                    lane, priority, destination, submitted_by, not_before, last_error, delivered_at, broker_message_id,
                    history_id, duplicate, unanswered_at, aborted_at, aborted_by, superseded_by, payload_bytes)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: keep_payload
-- Write the payload of the row just written into the new file.
INSERT INTO outbox_payload (seq, payload) VALUES (last_insert_rowid(), ?);

-- name: is_kept
-- Whether the new file has a client_message_id.
SELECT EXISTS (SELECT 1 FROM outbox WHERE client_message_id = ?1);

-- name: bury
-- An id whose row cannot be read stays used: an aborted row without its message, of nobody's.
INSERT INTO outbox (id, client_message_id, request_fingerprint, enqueued_at, next_attempt_at, status, priority,
                    destination, submitted_by, last_error, aborted_at, aborted_by, payload_bytes)
VALUES (:id, :client_message_id, zeroblob(32), :now, :now, 'aborted', 'next', '', '-1:-1', 'unreadable: the row was damaged',
        :now, 'auto', 0);

-- name: log_lines
-- A stretch of the damaged file's operator log.
SELECT seq, at, verb, actor, reason, row_id, detail FROM operator_log WHERE seq BETWEEN ? AND ?;

-- name: last_log_line
-- The largest seq of the operator log.
SELECT max(seq) FROM operator_log;

-- name: keep_log_line
-- Write a line of the operator log into the new file.
INSERT INTO operator_log (seq, at, verb, actor, reason, row_id, detail) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: controls
-- What operators told the relay.
SELECT destination, paused, rate_per_second FROM relay_control;

-- name: keep_control
-- Write it into the new file.
INSERT INTO relay_control (destination, paused, rate_per_second) VALUES (?, ?, ?);

-- name: moved
-- The moved rows of a stretch of the damaged file.
SELECT destination, priority, submitted_by, last_error, seq, id, client_message_id, request_fingerprint, attempts,
       enqueued_at, settled_after, pruned_after, not_before, broker_message_id, history_id, duplicate, unanswered_at,
       aborted_by, superseded_by
FROM outbox_settled JOIN outbox_common ON number = common WHERE seq BETWEEN ? AND ?;

-- name: last_moved
-- The largest seq of a moved row.
SELECT max(seq) FROM outbox_settled;

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
