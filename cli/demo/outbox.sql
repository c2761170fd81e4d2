-- What the daemon's outbox holds, read once the daemon has stopped. Parameters named :ids are JSON arrays.

-- name: first_rows
-- Rows that a caller made, those that an operator's requeue made left out.
SELECT count(*) FROM outbox WHERE id NOT IN (SELECT superseded_by FROM outbox WHERE superseded_by IS NOT NULL);

-- name: rows_with_ids
-- Rows under these ids; each id has one at most.
SELECT count(*) FROM outbox WHERE client_message_id IN (SELECT value FROM json_each(:ids));

-- name: died
-- Rows that the broker refused permanently, whatever an operator made of them since.
SELECT count(*) FROM outbox WHERE status IN ('dead', 'aborted') AND last_error LIKE 'topic_not_found:%';

-- name: requeued
-- Rows that an operator replaced by a successor that then arrived.
SELECT count(*) FROM outbox AS old JOIN outbox AS new ON new.id = old.superseded_by
WHERE old.status = 'aborted' AND new.status = 'done';

-- name: accepted
-- What the daemon believes that the broker has: id and fingerprint.
SELECT client_message_id, request_fingerprint FROM outbox WHERE status = 'done';

-- name: unsettled
-- Rows whose way is not at its end.
SELECT count(*) FROM outbox WHERE status IN ('pending', 'inflight', 'dead');

-- name: done_to_others
-- What the daemon believes that the broker has for queues and members.
SELECT count(*) FROM outbox WHERE status = 'done' AND destination NOT LIKE 'topic:%';

-- name: done_to_topics
-- What the daemon believes that the broker has for topics.
SELECT count(*) FROM outbox WHERE status = 'done' AND destination LIKE 'topic:%';
