-- name: rows_by_client_message_id
-- The rows with these client_message_ids, and the moved rows of these numbers.
SELECT json_group_array(json(stored))
FROM (SELECT stored FROM outbox_row WHERE client_message_id IN (SELECT value FROM json_each(?))
      UNION ALL
      SELECT stored FROM outbox_settled_row WHERE seq IN (SELECT value FROM json_each(?)));

-- name: settled_of
-- Those of these rows that wait no more: they are done, dead or aborted, moved or not.
SELECT json_group_array(value) FROM json_each(?)
WHERE NOT EXISTS (SELECT 1 FROM outbox WHERE id = value AND status IN ('pending', 'inflight'));

-- name: row
-- One row.
SELECT stored FROM outbox_row WHERE seq = :seq UNION ALL SELECT stored FROM outbox_settled_row WHERE seq = :seq;

-- name: unanswered
-- Those of these rows whose outcome is unknown, as the broker is asked for them.
SELECT id, client_message_id, request_fingerprint, unanswered_at
FROM outbox
WHERE id IN (SELECT value FROM json_each(?)) AND status IN ('pending', 'dead') AND unanswered_at IS NOT NULL
ORDER BY seq;

-- name: predecessor
-- The row that this one superseded.
SELECT seq FROM outbox WHERE superseded_by = :id UNION ALL SELECT seq FROM outbox_settled WHERE superseded_by = :seq;

-- name: failed_posts
-- The posts of these rows that the broker did not accept, as operators see them, a row's oldest first.
SELECT json_group_array(json_object(
    'row_id', outbox.id, 'at', strftime('%Y-%m-%dT%H:%M:%fZ', (post.value ->> 0) / 1000.0, 'unixepoch'),
    'seconds', (post.value ->> 1) / 1000.0, 'code', post.value ->> 2, 'broker', post.value ->> 3,
    'since', strftime('%Y-%m-%dT%H:%M:%fZ', (post.value ->> 4) / 1000.0, 'unixepoch'), 'times', post.value ->> 5))
FROM json_each(?) AS wanted CROSS JOIN outbox ON outbox.id = wanted.value CROSS JOIN outbox_failed_posts USING (seq)
CROSS JOIN json_each(posts) AS post;

-- name: traceparents
-- The traceparents of these rows: [[id, traceparent or null], …]; a row whose payload was pruned has none.
SELECT json_group_array(json_array(outbox.id, CAST(payload AS TEXT) ->> '$.traceparent'))
FROM json_each(?) AS wanted CROSS JOIN outbox ON outbox.id = wanted.value CROSS JOIN outbox_payload USING (seq);

-- name: unreported
-- The next rows whose end the broker has not heard of: their numbers there, and in the outbox.
SELECT number, seq FROM outbox_unreported ORDER BY number LIMIT ?;

-- name: operations
-- The latest lines of the log below the number :cursor, of things :noun, by :verb, by :actor, to the row :key, from :since
-- on, each of which but the time may be null.
SELECT seq, at, verb, actor, reason, row_id, detail, noun FROM (
  SELECT *, CASE WHEN row_id IS NOT NULL THEN 'row' WHEN verb IN ('pause', 'resume') THEN 'relay' ELSE 'outbox' END AS noun
  FROM operator_log
)
WHERE (:noun IS NULL OR noun = :noun) AND (:verb IS NULL OR verb = :verb) AND (:actor IS NULL OR actor = :actor)
  AND (:key IS NULL OR row_id = :key) AND at >= :since AND (:cursor IS NULL OR seq < :cursor)
ORDER BY seq DESC LIMIT :limit;

-- name: log
-- What operators did to these rows, as they see it, oldest first.
SELECT json_group_array(json_object('at', strftime('%Y-%m-%dT%H:%M:%fZ', at / 1000.0, 'unixepoch'), 'verb', verb,
                                    'actor', actor, 'reason', reason, 'row_id', row_id, 'detail', detail))
FROM (SELECT * FROM operator_log WHERE row_id IN (SELECT value FROM json_each(?)) ORDER BY seq);

-- name: walk_all
-- The next rows in age order: candidates for a page.
SELECT json_group_array(seq) FROM (
    SELECT seq FROM (
        SELECT * FROM (SELECT seq FROM outbox WHERE seq > :after AND seq <= :until ORDER BY seq LIMIT :scan) UNION ALL
        SELECT * FROM (SELECT seq FROM outbox_settled WHERE seq > :after AND seq <= :until ORDER BY seq LIMIT :scan)
    ) ORDER BY seq LIMIT :scan
);

-- name: walk_pending
-- The next pending rows in age order: candidates for a page. Each lane is in age order; the lanes are merged.
SELECT json_group_array(seq) FROM (
    SELECT seq FROM (
        SELECT * FROM (SELECT seq FROM outbox WHERE lane = 0 AND seq > :after AND seq <= :until ORDER BY seq LIMIT :scan) UNION ALL
        SELECT * FROM (SELECT seq FROM outbox WHERE lane = 1 AND seq > :after AND seq <= :until ORDER BY seq LIMIT :scan) UNION ALL
        SELECT * FROM (SELECT seq FROM outbox WHERE lane = 2 AND seq > :after AND seq <= :until ORDER BY seq LIMIT :scan) UNION ALL
        SELECT * FROM (SELECT seq FROM outbox WHERE lane = 3 AND seq > :after AND seq <= :until ORDER BY seq LIMIT :scan) UNION ALL
        SELECT * FROM (SELECT seq FROM outbox WHERE lane = 4 AND seq > :after AND seq <= :until ORDER BY seq LIMIT :scan)
    ) ORDER BY seq LIMIT :scan
);

-- name: walk_status
-- The next rows that are inflight or dead, in age order: candidates for a page.
SELECT json_group_array(seq)
FROM (SELECT seq FROM outbox
      WHERE status = :status AND status IN ('inflight', 'done', 'dead', 'aborted') AND seq > :after AND seq <= :until
      ORDER BY seq LIMIT :scan);

-- name: walk_ids
-- Those of the rows that the filter names, in age order: candidates for a page.
SELECT json_group_array(seq)
FROM (SELECT DISTINCT value AS seq FROM json_each(:named) WHERE value > :after AND value <= :until
      ORDER BY seq LIMIT :scan);

-- name: last_seq
-- The youngest row there is: where a job ends that writes rows itself.
SELECT max(coalesce((SELECT max(seq) FROM outbox), 0), coalesce((SELECT max(seq) FROM outbox_settled), 0));

-- name: page
-- Those of the candidates that match every part of the filter that is set, as a JSON array of [seq, row].
SELECT json_group_array(json_array(seq, json(stored)))
FROM (SELECT seq, stored FROM outbox_row
      WHERE seq IN (SELECT value FROM json_each(:seqs))
        AND (:status IS NULL OR status = :status)
        AND (:destination IS NULL OR destination = :destination)
        AND (:held IS NULL OR held = :held)
        AND (:code IS NULL OR last_error = :code OR substr(last_error, 1, length(:code) + 1) = :code || ':')
        AND (:enqueued_before IS NULL OR enqueued_at < :enqueued_before)
      UNION ALL
      SELECT seq, stored FROM outbox_settled_row
      WHERE seq IN (SELECT value FROM json_each(:seqs))
        AND (:status IS NULL OR status = :status)
        AND (:destination IS NULL OR destination = :destination)
        AND (:held IS NULL OR held = :held)
        AND (:code IS NULL OR last_error = :code OR substr(last_error, 1, length(:code) + 1) = :code || ':')
        AND (:enqueued_before IS NULL OR enqueued_at < :enqueued_before)
      ORDER BY seq LIMIT :limit);

-- name: tally
-- The kept counters.
SELECT pending, inflight, done, dead, aborted, payload_bytes, waiting_room FROM tally;

-- name: oldest_pending
-- When the oldest pending row was enqueued: the oldest of each lane.
SELECT min(enqueued_at) FROM (
    SELECT * FROM (SELECT enqueued_at FROM outbox WHERE lane = 0 ORDER BY seq LIMIT 1) UNION ALL
    SELECT * FROM (SELECT enqueued_at FROM outbox WHERE lane = 1 ORDER BY seq LIMIT 1) UNION ALL
    SELECT * FROM (SELECT enqueued_at FROM outbox WHERE lane = 2 ORDER BY seq LIMIT 1) UNION ALL
    SELECT * FROM (SELECT enqueued_at FROM outbox WHERE lane = 3 ORDER BY seq LIMIT 1) UNION ALL
    SELECT * FROM (SELECT enqueued_at FROM outbox WHERE lane = 4 ORDER BY seq LIMIT 1)
);

-- name: due_since
-- Since when the row is due that has waited longest, by the first hundred of each lane, those that wait for their next
-- attempt, and those that are inflight. What is held is not due.
SELECT min(age_from) FROM (
    SELECT * FROM (SELECT age_from, not_before FROM outbox WHERE lane = 0 ORDER BY seq LIMIT 100) UNION ALL
    SELECT * FROM (SELECT age_from, not_before FROM outbox WHERE lane = 1 ORDER BY seq LIMIT 100) UNION ALL
    SELECT * FROM (SELECT age_from, not_before FROM outbox WHERE lane = 2 ORDER BY seq LIMIT 100) UNION ALL
    SELECT * FROM (SELECT age_from, not_before FROM outbox INDEXED BY outbox_waiting WHERE lane = 3
                   ORDER BY next_attempt_at LIMIT 100) UNION ALL
    SELECT * FROM (SELECT age_from, not_before FROM outbox
                   WHERE status = 'inflight' AND status IN ('inflight', 'done', 'dead', 'aborted') LIMIT 100)
) WHERE coalesce(not_before, 0) <= :now;

-- name: controls
-- Operators' settings of the relay.
SELECT destination, paused, rate_per_second FROM relay_control;
