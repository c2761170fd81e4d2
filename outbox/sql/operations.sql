-- name: get
-- One row, moved or not.
SELECT seq, id, client_message_id, status, held, next_attempt_at, not_before, priority, payload_bytes, room,
       unanswered_at, 0
FROM outbox WHERE seq = :seq
UNION ALL
SELECT seq, stored ->> 'id', stored ->> 'client_message_id', status, 0, 0, NULL, 'next', 0, 0, NULL, 1
FROM outbox_settled_row WHERE seq = :seq;

-- name: abort
-- Retire a row.
UPDATE outbox
SET status = 'aborted', lane = NULL, aborted_at = :now, aborted_by = 'operator', superseded_by = :successor
WHERE seq = :seq;

-- name: doubt
-- The file is older than its outbox was: the broker may have accepted any row that waits in it.
UPDATE outbox SET unanswered_at = :now WHERE lane IS NOT NULL AND unanswered_at IS NULL;

-- name: room
-- What those rows take that `accepted` changes.
SELECT coalesce(sum(room), 0)
FROM json_each(:found) AS found CROSS JOIN outbox ON outbox.id = found.value ->> 0
WHERE outbox.unanswered_at = found.value ->> 1 AND outbox.status = :status;

-- name: accepted
-- The broker has these rows after all: [[id, unanswered_at, broker_message_id, history_id], …]. A row that has been posted
-- again since they were looked up is left alone.
UPDATE outbox
SET status = 'done', lane = NULL, delivered_at = :now, broker_message_id = found.value ->> 2,
    history_id = found.value ->> 3, duplicate = 1, unanswered_at = NULL
FROM json_each(:found) AS found
WHERE outbox.id = found.value ->> 0 AND outbox.unanswered_at = found.value ->> 1 AND outbox.status = :status;

-- name: done_of
-- Those of these rows that are done, as a JSON array of ids: [[id, …], …].
SELECT json_group_array(id) FROM outbox
WHERE id IN (SELECT value ->> 0 FROM json_each(:found)) AND status = 'done';

-- name: not_accepted
-- The broker has none of these rows: [[id, unanswered_at], …]. A row that has been posted again since is left alone.
UPDATE outbox SET unanswered_at = NULL
FROM json_each(:absent) AS absent
WHERE outbox.id = absent.value ->> 0 AND outbox.unanswered_at = absent.value ->> 1
  AND outbox.status IN ('pending', 'dead');

-- name: succeed
-- Write the successor of a row, with what an operator patched; its payload follows.
INSERT INTO outbox (seq, id, client_message_id, request_fingerprint, enqueued_at, next_attempt_at, lane, priority,
                    destination, submitted_by, not_before, payload_bytes)
SELECT :number, :id, :client_message_id, coalesce(:fingerprint, request_fingerprint), :now, :next_attempt_at, :lane, :priority,
       coalesce(:destination, destination), submitted_by, :not_before, :payload_bytes
FROM outbox WHERE seq = :seq;

-- name: succeed_payload
-- Write a payload, patched or in a trace of its own, for the successor just written; else the same one.
INSERT INTO outbox_payload (seq, payload)
SELECT last_insert_rowid(), coalesce(:payload, payload) FROM outbox_payload WHERE seq = :seq;

-- name: payload_of
-- The payload of a row that was not pruned.
SELECT payload FROM outbox_payload WHERE seq = ?;

-- name: reported
-- The broker has heard of the ends with these numbers.
DELETE FROM outbox_unreported WHERE number IN (SELECT value FROM json_each(?));

-- name: move
-- Put a pending row into another lane.
UPDATE outbox SET lane = :lane, next_attempt_at = :next_attempt_at WHERE seq = :seq;

-- name: log
-- Note what an operator did.
INSERT INTO operator_log (at, verb, actor, reason, row_id, detail)
VALUES (:at, :verb, :actor, :reason, :row_id, :detail);

-- name: set_control
-- Store an operator's setting of the relay for a destination.
INSERT INTO relay_control (destination, paused, rate_per_second) VALUES (:destination, :paused, :rate_per_second)
ON CONFLICT (destination) DO UPDATE SET paused = excluded.paused, rate_per_second = excluded.rate_per_second;

-- name: resume
-- Make rows due that wait for their next attempt, but for what their sender wants later.
UPDATE outbox
SET next_attempt_at = :now, lane = due_lane
WHERE seq IN (
    SELECT seq FROM outbox INDEXED BY outbox_waiting
    WHERE lane = 3 AND coalesce(not_before, 0) <= :now AND (:destination = '' OR destination = :destination)
    ORDER BY next_attempt_at LIMIT :limit
);
