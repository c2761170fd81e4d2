-- name: salt
-- What the keys of this file are made with.
SELECT salt FROM outbox_salt;

-- name: prunable
-- Those of the next `scan` done and aborted rows after `after` that settled before `before`, as a JSON array, oldest first;
-- and the last of the stretch, where older rows than that may follow it.
SELECT json_group_array(
           json_array(seq, id, client_message_id, hex(request_fingerprint), destination, priority, submitted_by,
                      CASE status WHEN 'aborted' THEN substr(last_error, 1, instr(last_error || ':', ':') - 1) END,
                      attempts, enqueued_at, coalesce(delivered_at, aborted_at), not_before, broker_message_id,
                      history_id, duplicate, unanswered_at, aborted_by, superseded_by, room, payload_bytes)
       ) FILTER (WHERE coalesce(delivered_at, aborted_at) < :before),
       CASE WHEN count(*) = :scan AND min(enqueued_at) < :before THEN max(seq) END
FROM (SELECT seq FROM (
          SELECT * FROM (SELECT seq FROM outbox
                         WHERE status = 'done' AND status IN ('inflight', 'done', 'dead', 'aborted') AND seq > :after
                         ORDER BY seq LIMIT :scan)
          UNION ALL
          SELECT * FROM (SELECT seq FROM outbox
                         WHERE status = 'aborted' AND status IN ('inflight', 'done', 'dead', 'aborted') AND seq > :after
                         ORDER BY seq LIMIT :scan)
      ) ORDER BY seq LIMIT :scan) AS settled
CROSS JOIN outbox USING (seq);

-- name: common
-- The number of what rows share.
SELECT number FROM outbox_common WHERE destination = ? AND priority = ? AND submitted_by = ? AND last_error = ?;

-- name: share
-- Keep what rows share.
INSERT INTO outbox_common (destination, priority, submitted_by, last_error) VALUES (?, ?, ?, ?) RETURNING number;

-- name: move
-- Keep what stays of rows; one group of VALUES per row, repeated.
INSERT INTO outbox_settled (seq, id, client_message_id, request_fingerprint, common, attempts, enqueued_at,
                            settled_after, pruned_after, not_before, broker_message_id, history_id, duplicate,
                            unanswered_at, aborted_by, superseded_by, checksum)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: key
-- Let the ids of these rows be found; repeated likewise.
INSERT INTO outbox_settled_key (key, seq)
VALUES (?, ?);

-- name: leave
-- Take the rows that were moved out of the outbox.
DELETE FROM outbox WHERE seq IN (SELECT value FROM json_each(?));

-- name: leave_payloads
-- The same with their payloads.
DELETE FROM outbox_payload WHERE seq IN (SELECT value FROM json_each(?));

-- name: leave_failed_posts
-- The same with what is known of their failed posts.
DELETE FROM outbox_failed_posts WHERE seq IN (SELECT value FROM json_each(?));

-- name: candidates
-- The rows that may have one of these ids.
SELECT seq, client_message_id
FROM json_each(?) AS wanted
CROSS JOIN outbox_settled_key ON outbox_settled_key.key = wanted.value
CROSS JOIN outbox_settled USING (seq);

-- name: row_with_id
-- The row with this id that was not moved.
SELECT seq FROM outbox WHERE id = :id;

-- name: row_with_client_id
-- The row with this client_message_id that was not moved.
SELECT seq FROM outbox WHERE client_message_id = :id;

-- name: rows_with_ids
-- The rows with one of these ids that were not moved, each with its id.
SELECT id, seq FROM outbox WHERE id IN (SELECT value FROM json_each(?));

-- name: rows_with_client_ids
-- The rows with one of these client_message_ids that were not moved.
SELECT seq FROM outbox WHERE client_message_id IN (SELECT value FROM json_each(?));

-- name: moved_with_id
-- The moved row with this packed id: row ids grow with seq, so it is searched for by halves.
WITH RECURSIVE search (low, high) AS (
    SELECT (SELECT min(seq) FROM outbox_settled), (SELECT max(seq) FROM outbox_settled)
    UNION ALL
    SELECT iif(probe.id < :id, probe.seq + 1, low), iif(probe.id < :id, high, (low + high) / 2)
    FROM search
    CROSS JOIN outbox_settled AS probe
        ON probe.seq = (SELECT min(seq) FROM outbox_settled WHERE seq >= (low + high) / 2)
    WHERE low < high
)
SELECT seq FROM outbox_settled
WHERE seq = (SELECT min(seq) FROM outbox_settled WHERE seq >= (SELECT max(low) FROM search)) AND id = :id;

-- name: answers
-- What a send under the id of one of these rows is answered with, as one JSON array (accept.sql: find); ids are packed.
SELECT json_group_array(json_array(seq, iif(typeof(client_message_id) = 'blob', '#' || hex(client_message_id), client_message_id),
                                   iif(typeof(id) = 'blob', '#' || hex(id), id),
                                   iif(aborted_by IS NULL, 'done', 'aborted'), lower(hex(request_fingerprint)),
                                   destination, enqueued_at, submitted_by,
                                   iif(typeof(broker_message_id) = 'blob', '#' || hex(broker_message_id), broker_message_id),
                                   history_id, nullif(last_error, '')))
FROM outbox_settled JOIN outbox_common ON number = common
WHERE seq IN (SELECT value FROM json_each(?));

-- name: last_id
-- The id of the newest row; none in an empty outbox.
SELECT id FROM (
    SELECT * FROM (SELECT seq, id FROM outbox ORDER BY seq DESC LIMIT 1) UNION ALL
    SELECT * FROM (SELECT seq, id FROM outbox_settled ORDER BY seq DESC LIMIT 1)
) ORDER BY seq DESC LIMIT 1;
