-- name: wake
-- Make the rows due whose time has come, the longest due first.
UPDATE outbox
SET lane = due_lane
WHERE seq IN (
    SELECT seq FROM outbox INDEXED BY outbox_waiting
    WHERE lane = 3 AND next_attempt_at <= :now ORDER BY next_attempt_at LIMIT :limit
);

-- name: shorten_waits
-- After the clock was set back: rows that wait beyond :latest are due, or when their sender said.
UPDATE outbox
SET next_attempt_at = max(:now, coalesce(not_before, 0)),
    lane = iif(not_before > :now, 3, due_lane)
WHERE seq IN (
    SELECT seq FROM outbox INDEXED BY outbox_waiting
    WHERE lane = 3 AND next_attempt_at > :latest AND next_attempt_at > coalesce(not_before, 0)
);

-- name: next_due
-- When the first of the waiting rows becomes due.
SELECT min(next_attempt_at) FROM outbox INDEXED BY outbox_waiting WHERE lane = 3;

-- name: candidates
-- The first rows of a lane after `after`, as a JSON array of [seq, payload bytes].
SELECT json_group_array(json_array(seq, payload_bytes))
FROM (SELECT seq, payload_bytes FROM outbox WHERE lane = :lane AND seq > :after ORDER BY seq LIMIT :limit);

-- name: candidates_elsewhere
-- The same without the destinations in `excluded`; looks at no more than `scan` rows.
SELECT json_group_array(json_array(seq, payload_bytes))
FROM outbox
WHERE seq IN (
    SELECT seq
    FROM (SELECT seq, destination FROM outbox WHERE lane = :lane AND seq > :after ORDER BY seq LIMIT :scan)
    WHERE destination NOT IN (SELECT value FROM json_each(:excluded))
    ORDER BY seq
    LIMIT :limit
);

-- name: scanned
-- How many rows `candidates_elsewhere` looked at, and the last of them.
SELECT count(*), max(seq)
FROM (SELECT seq FROM outbox WHERE lane = :lane AND seq > :after ORDER BY seq LIMIT :scan);

-- name: take
-- Make the chosen rows inflight.
UPDATE outbox SET status = 'inflight', lane = NULL
WHERE seq IN (SELECT value FROM json_each(?));

-- name: taken
-- The chosen rows as one JSON array, without a step per row. Each payload is JSON and spliced in as it lies; ids and
-- destinations were checked before they were written, and hold nothing that JSON would escape.
SELECT CAST('[' || coalesce(group_concat(
           '["' || outbox.id || '","' || client_message_id || '","' || hex(request_fingerprint) || '",'
           || CAST(payload AS TEXT) || ',"' || destination || '",' || attempts || ','
           || max(age_from, iif(outbox.id > :own_after AND unanswered_at IS NULL, :own_since, 0))
           || ',' || coalesce(not_before, 0) || ']'
       ), '') || ']' AS BLOB)
FROM json_each(:seqs) AS chosen
CROSS JOIN outbox ON outbox.seq = chosen.value
CROSS JOIN outbox_payload ON outbox_payload.seq = chosen.value;

-- name: room
-- What those of the rows take that are settled now: [[id, …], …].
SELECT coalesce(sum(room), 0) FROM outbox
WHERE id IN (SELECT json_extract(value, '$[0]') FROM json_each(:settlements)) AND status = 'inflight';

-- name: note_failed_posts
-- Add a failed post to those of each row that is inflight: [[id, code], …].
INSERT INTO outbox_failed_posts (seq, posts)
SELECT seq, json_array(json_array(:at, :took, answer.value ->> 1, :broker, :at, 1))
FROM json_each(:answers) AS answer CROSS JOIN outbox ON outbox.id = answer.value ->> 0
WHERE status = 'inflight'
ON CONFLICT (seq) DO UPDATE SET posts = CASE
    WHEN posts ->> '$[#-1][2]' = excluded.posts ->> '$[0][2]' AND posts ->> '$[#-1][3]' = :broker
    THEN json_set(posts, '$[#-1][0]', :at, '$[#-1][1]', :took, '$[#-1][5]', (posts ->> '$[#-1][5]') + 1)
    ELSE json_insert(iif(json_array_length(posts) < 20, posts, json_remove(posts, '$[0]')),
                     '$[#]', json(excluded.posts -> 0)) END;

-- name: interrupted
-- What a crash left inflight, as `note_failed_posts` takes it.
SELECT json_group_array(json_array(id, 'interrupted')) FROM outbox
WHERE status = 'inflight' AND status IN ('inflight', 'done', 'dead', 'aborted');

-- name: to_report
-- Have the broker hear of these rows, unless they wait.
INSERT INTO outbox_unreported (seq)
SELECT seq FROM json_each(:ids) AS ended CROSS JOIN outbox ON outbox.id = ended.value
WHERE status IN ('dead', 'aborted', 'done');

-- name: settle_done
-- The broker has them: [[id, broker_message_id, history_id, 1 where it had them before], …].
UPDATE outbox
SET status = 'done', attempts = attempts + 1, delivered_at = :now, broker_message_id = answer.broker_message_id,
    history_id = answer.history_id, duplicate = answer.duplicate, unanswered_at = NULL
FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS broker_message_id,
             json_extract(value, '$[2]') AS history_id, json_extract(value, '$[3]') AS duplicate
      FROM json_each(:settlements)) AS answer
WHERE outbox.id = answer.id AND outbox.status = 'inflight';

-- name: settle_dead
-- The broker refused them permanently, or they are too old: [[id, last_error, whether a post was answered], …].
UPDATE outbox
SET status = 'dead', attempts = attempts + 1, last_error = answer.last_error,
    unanswered_at = CASE answer.answered WHEN 0 THEN :now WHEN 1 THEN NULL ELSE unanswered_at END
FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS last_error,
             json_extract(value, '$[2]') AS answered
      FROM json_each(:settlements)) AS answer
WHERE outbox.id = answer.id AND outbox.status = 'inflight';

-- name: settle_retry
-- Not now, and never before `not_before`: [[id, ms to wait, last_error or null, attempts burnt, whether a post was answered], …].
UPDATE outbox
SET status = 'pending', attempts = attempts + answer.burnt, next_attempt_at = max(:now + answer.wait, coalesce(not_before, 0)),
    last_error = coalesce(answer.last_error, outbox.last_error),
    unanswered_at = CASE answer.answered WHEN 0 THEN :now WHEN 1 THEN NULL ELSE unanswered_at END,
    lane = iif(answer.wait > 0 OR not_before > :now, 3, due_lane)
FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS wait,
             json_extract(value, '$[2]') AS last_error, json_extract(value, '$[3]') AS burnt,
             json_extract(value, '$[4]') AS answered
      FROM json_each(:settlements)) AS answer
WHERE outbox.id = answer.id AND outbox.status = 'inflight';

-- name: reclaim
-- After a crash nobody knows how far an inflight row came: it goes back, the attempt counts, and its outcome is unknown.
UPDATE outbox
SET status = 'pending', attempts = attempts + 1, unanswered_at = :now,
    lane = due_lane
WHERE status = 'inflight' AND status IN ('inflight', 'done', 'dead', 'aborted');

-- name: expired
-- Those of the next `scan` rows of a lane that were both enqueued and meant to go before `before`, as a JSON array of
-- ids; and the last of the stretch, where older rows than that may follow it.
SELECT json_group_array(id) FILTER (
           WHERE max(age_from, iif(id > :own_after AND unanswered_at IS NULL, :own_since, 0)) < :before),
       CASE WHEN count(*) = :scan AND min(enqueued_at) < :before THEN max(seq) END
FROM (SELECT seq, id, enqueued_at, age_from, unanswered_at FROM outbox
      WHERE lane = :lane AND seq > :after ORDER BY seq LIMIT :scan);

-- name: expire
-- Give these pending rows up.
UPDATE outbox SET status = 'dead', lane = NULL, last_error = :last_error
WHERE id IN (SELECT value FROM json_each(:ids)) AND status = 'pending';
