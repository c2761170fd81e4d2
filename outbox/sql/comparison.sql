-- name: comparison
-- What the done rows were last compared with, and how far.
SELECT incarnation, since, after, until FROM comparison;

-- name: last_history_id
-- The number that the broker gave the last done row, moved or not; 0 where there is none.
SELECT max(
    coalesce((SELECT history_id FROM outbox
              WHERE status = 'done' AND status IN ('inflight', 'done', 'dead', 'aborted') ORDER BY seq DESC LIMIT 1), 0),
    coalesce((SELECT history_id FROM outbox_settled WHERE aborted_by IS NULL ORDER BY seq DESC LIMIT 1), 0)
);

-- name: begin
-- Compare the done rows that settled from `since` on with another database.
INSERT INTO comparison (only, incarnation, since, after, until)
VALUES (1, :incarnation, :since, 0, max(coalesce((SELECT max(seq) FROM outbox), 0),
                                        coalesce((SELECT max(seq) FROM outbox_settled), 0)))
ON CONFLICT (only) DO UPDATE
SET incarnation = excluded.incarnation, since = excluded.since, after = excluded.after, until = excluded.until;

-- name: stretch
-- The next `scan` rows after `after`, moved or not, and which of them are to be compared.
SELECT * FROM (
    SELECT * FROM (SELECT seq, client_message_id, request_fingerprint, status = 'done' AND delivered_at >= :since
                   FROM outbox WHERE seq > :after AND seq <= :until ORDER BY seq LIMIT :scan)
    UNION ALL
    SELECT * FROM (SELECT seq, client_message_id, request_fingerprint,
                          aborted_by IS NULL AND enqueued_at + settled_after >= :since
                   FROM outbox_settled WHERE seq > :after AND seq <= :until ORDER BY seq LIMIT :scan)
) ORDER BY seq LIMIT :scan;

-- name: compared
-- Go on after this row, unless another comparison has begun.
UPDATE comparison SET after = :after WHERE incarnation = :incarnation AND after < :after;

-- name: found
-- The database has these rows, or they are missing no more.
DELETE FROM outbox_missing WHERE seq IN (SELECT value FROM json_each(:seqs));

-- name: other_ids
-- Of the rows that the database has, those that have other ids there than here, and what they have here.
SELECT outbox.id, broker_message_id, history_id
FROM json_each(:found) AS found JOIN outbox ON seq = found.value ->> 0
WHERE status = 'done' AND broker_message_id <> found.value ->> 1;

-- name: take_ids
-- Give these rows the ids that the database has for them.
UPDATE outbox SET broker_message_id = found.value ->> 1, history_id = found.value ->> 2
FROM json_each(:found) AS found
WHERE seq = found.value ->> 0 AND status = 'done' AND broker_message_id <> found.value ->> 1;

-- name: lost
-- The database does not have these rows, as far as they are still done.
INSERT INTO outbox_missing (seq)
SELECT value FROM json_each(:seqs) AS lost
WHERE EXISTS (SELECT 1 FROM outbox WHERE seq = lost.value AND status = 'done')
   OR EXISTS (SELECT 1 FROM outbox_settled WHERE seq = lost.value AND aborted_by IS NULL)
ON CONFLICT DO NOTHING;

-- name: missing
-- How many rows the database does not have, and how many of them have no payload any more.
SELECT count(*), count(outbox_settled.seq) FROM outbox_missing LEFT JOIN outbox_settled USING (seq);

-- name: next
-- The next rows that the database does not have: what they were there, where the payload is kept; else their ids alone.
SELECT missing.seq, outbox.id, outbox.broker_message_id, outbox.history_id, pruned.id, pruned.client_message_id
FROM outbox_missing AS missing
LEFT JOIN outbox USING (seq)
LEFT JOIN outbox_settled AS pruned USING (seq)
WHERE missing.seq > :after ORDER BY missing.seq LIMIT :limit;

-- name: room
-- What these rows take.
SELECT coalesce(sum(room), 0) FROM outbox WHERE seq IN (SELECT value FROM json_each(:seqs)) AND status = 'done';

-- name: resend
-- Send these rows again under their own ids: as if they had been sent now.
UPDATE outbox
SET status = 'pending', lane = due_lane, next_attempt_at = :now,
    resent_at = :now, delivered_at = NULL, broker_message_id = NULL, history_id = NULL, duplicate = NULL
WHERE seq IN (SELECT value FROM json_each(:seqs)) AND status = 'done';
