-- What the broker's database holds: mesh.client_message_dedupe, mesh.message_history, postroom.inbox_messages.

-- name: accepted
-- What was accepted: id and fingerprint.
SELECT client_message_id, request_fingerprint FROM mesh.client_message_dedupe;

-- name: history
-- Messages in the history.
SELECT count(*) FROM mesh.message_history;

-- name: history_of_ids
-- Messages in the history under these ids ($1); one that was accepted twice would count twice.
SELECT count(*) FROM mesh.message_history WHERE client_message_id = ANY ($1::text[]);

-- name: history_of_others
-- Messages in the history that are for queues and members.
SELECT count(*) FROM mesh.message_history WHERE destination_kind <> 'topic';

-- name: processed
-- Messages of a subject ($1) that a consumer gave to its handler, which took them.
SELECT count(*) FROM postroom.inbox_messages WHERE subject = $1 AND processed_at IS NOT NULL;

-- name: buried
-- Messages that a consumer buried.
SELECT count(*) FROM postroom.inbox_messages WHERE dead_at IS NOT NULL;
