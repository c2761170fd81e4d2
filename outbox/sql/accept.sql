-- name: insert
-- Write new rows; one group of VALUES per row, repeated by the writer. A row whose client_message_id exists is left out.
INSERT INTO outbox (id, client_message_id, request_fingerprint, enqueued_at, next_attempt_at, lane, priority,
                    destination, submitted_by, not_before, payload_bytes)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (client_message_id) DO NOTHING;

-- name: insert_numbered
-- The same with the number of the row, NULL for the one after the newest.
INSERT INTO outbox (seq, id, client_message_id, request_fingerprint, enqueued_at, next_attempt_at, lane, priority,
                    destination, submitted_by, not_before, payload_bytes)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_payloads
-- Write the payloads of rows just written; repeated likewise.
INSERT INTO outbox_payload (seq, payload)
VALUES (?, ?);

-- name: find
-- The rows that hold these client_message_ids, as one JSON array.
SELECT json_group_array(json_array(seq, client_message_id, id, status, lower(hex(request_fingerprint)), destination,
                                   enqueued_at, submitted_by, broker_message_id, history_id, last_error))
FROM outbox
WHERE client_message_id IN (SELECT value FROM json_each(?));
