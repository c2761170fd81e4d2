-- What Postgres knows of messages, for their story (docs/contract/operate.md#operate-51). Each table is looked up by an index,
-- with all ids of one round at once.

-- name: find_reach
-- The meshes that may be looked at, by id and slug: the one with the id $1, or all of them where that is null.
SELECT array_agg(id) AS ids, array_agg(slug) AS slugs FROM mesh.mesh WHERE $1::integer IS NULL OR id = $1;

-- name: find_messages
-- The messages that were accepted under the ids $1, or as $2, in the meshes $3, and which the member $4 may read (null: all).
SELECT dedupe.broker_message_id, dedupe.client_message_id, mesh.slug AS mesh, sender.name AS sender, dedupe.history_id,
  dedupe.destination_kind || ':' || dedupe.destination_ref AS destination, dedupe.first_seen_at, dedupe.history_available,
  coalesce(topic_message.traceparent, message_queue.traceparent) AS traceparent
FROM (
  SELECT wanted.mesh_id, wanted.client_message_id
  FROM (SELECT mesh_id, client_message_id FROM unnest($3::integer[]) AS mesh_id, unnest($1::text[]) AS client_message_id)
    AS wanted
  UNION SELECT mesh_id, client_message_id FROM mesh.topic_message WHERE broker_message_id = ANY ($2::uuid[])
  UNION SELECT mesh_id, client_message_id FROM mesh.message_queue WHERE broker_message_id = ANY ($2::uuid[])
) AS found
JOIN mesh.client_message_dedupe AS dedupe USING (mesh_id, client_message_id)
JOIN mesh.mesh ON mesh.id = dedupe.mesh_id
JOIN mesh.member AS sender ON sender.id = dedupe.sender_id
LEFT JOIN mesh.topic_message ON topic_message.broker_message_id = dedupe.broker_message_id
LEFT JOIN mesh.message_queue ON message_queue.broker_message_id = dedupe.broker_message_id
LEFT JOIN mesh.message_history AS history ON history.mesh_id = dedupe.mesh_id AND history.history_id = dedupe.history_id
WHERE dedupe.mesh_id = ANY ($3) AND (
  $4::integer IS NULL OR dedupe.sender_id = $4
  OR (history.destination_kind = 'dm' AND history.destination_id = $4)
  OR (history.destination_kind = 'topic'
    AND history.destination_id IN (SELECT topic_id FROM mesh.topic_subscription WHERE member_id = $4))
);

-- name: keep_ended_rows
-- Keep what the daemon of the member $2 of the mesh $1 on the host $3 reports of its rows $4: their ids, those of their
-- messages $5 and of their successors' messages $6, and the reports $7. An earlier report of the same row goes. Nothing is kept
-- where that member was deleted.
INSERT INTO mesh.ended_row (mesh_id, member_id, host, row_id, client_message_id, successor, report)
SELECT $1, reporting.id, $3, ended.*
FROM (SELECT id FROM mesh.member WHERE id = $2 FOR KEY SHARE) AS reporting,
  unnest($4::text[], $5::text[], $6::text[], $7::text[]) AS ended
ON CONFLICT (row_id, member_id) DO UPDATE
SET successor = excluded.successor, host = excluded.host, report = excluded.report, reported_at = excluded.reported_at;

-- name: forget_ended_rows
-- Forget the rows $2 of the member $1: they turned out to be accepted.
DELETE FROM mesh.ended_row WHERE member_id = $1 AND row_id = ANY ($2::text[]);

-- name: limit_ended_rows
-- Forget of the rows of the member $1 all but those $2 that were reported last.
DELETE FROM mesh.ended_row WHERE member_id = $1 AND row_id IN (
  SELECT row_id FROM mesh.ended_row WHERE member_id = $1 ORDER BY reported_at DESC, row_id DESC OFFSET $2
);

-- name: sweep_ended_rows
-- Forgets up to $1 rows that were reported longer than $2 ago.
DELETE FROM mesh.ended_row WHERE (row_id, member_id) IN (
  SELECT row_id, member_id FROM mesh.ended_row WHERE reported_at < now() - $2::interval ORDER BY reported_at LIMIT $1
);

-- name: find_ended_rows
-- The rows of daemons that ended and have one of the ids $1, or a message that has, or a successor; of the meshes $2.
SELECT ended.row_id, member.name AS member, mesh.slug AS mesh, ended.host, ended.successor, ended.report
FROM (
  SELECT row_id, member_id FROM mesh.ended_row WHERE row_id = ANY ($1::text[])
  UNION SELECT row_id, member_id FROM mesh.ended_row WHERE mesh_id = ANY ($2::integer[]) AND client_message_id = ANY ($1)
  UNION SELECT row_id, member_id FROM mesh.ended_row WHERE mesh_id = ANY ($2) AND successor = ANY ($1)
) AS found
JOIN mesh.ended_row AS ended USING (row_id, member_id)
JOIN mesh.member ON member.id = ended.member_id
JOIN mesh.mesh ON mesh.id = ended.mesh_id
WHERE ended.mesh_id = ANY ($2) ORDER BY ended.row_id LIMIT $3;

-- name: find_events
-- The events $1 and, where $3, those that they caused, of the meshes $2; of one that is not published also which event of its
-- aggregate it waits for.
SELECT event.*, CASE WHEN event.published_at IS NULL THEN (
  SELECT first.id FROM postroom.outbox_events AS first
  WHERE first.aggregate_id = event.aggregate_id AND first.published_at IS NULL ORDER BY first.position LIMIT 1
) END AS first_of_aggregate
FROM (
  SELECT id, subject, aggregate_type, aggregate_id, event_type, occurred_at, correlation_id, causation_id, published_at,
    publish_attempts, publish_error, next_attempt_at, stream, stream_sequence, epoch,
    NULL::timestamptz AS dropped_at, NULL::text AS dropped_by, NULL::text AS reason
  FROM postroom.outbox_events
  WHERE id = ANY ($1::uuid[])
  UNION ALL
  SELECT id, subject, aggregate_type, aggregate_id, event_type, occurred_at, correlation_id, causation_id, published_at,
    publish_attempts, publish_error, next_attempt_at, stream, stream_sequence, epoch, NULL, NULL, NULL
  FROM postroom.outbox_events
  WHERE $3 AND causation_id = ANY ($1) AND causation_id IS NOT NULL
  UNION ALL
  SELECT id, subject, aggregate_type, aggregate_id, event_type, occurred_at, correlation_id, causation_id, NULL,
    publish_attempts, publish_error, NULL, NULL, NULL, 0, dropped_at, dropped_by, reason
  FROM postroom.dropped_events WHERE id = ANY ($1)
) AS event
WHERE postroom.context_of(event.subject) = ANY ($2::text[])
ORDER BY event.occurred_at LIMIT $4;

-- name: find_deliveries
-- The deliveries of the messages $1.
SELECT delivery.broker_message_id, member.name AS recipient, mesh.inbox_subject(member.id) AS subject,
  delivery.enqueued_at, delivery.published_at, delivery.publish_attempts, delivery.publish_error, delivery.next_attempt_at,
  delivery.stream, delivery.stream_sequence, delivery.epoch,
  NULL::timestamptz AS dropped_at, NULL::text AS dropped_by, NULL::text AS reason
FROM mesh.delivery_queue AS delivery JOIN mesh.member ON member.id = delivery.recipient_id
WHERE delivery.broker_message_id = ANY ($1::uuid[])
UNION ALL
SELECT broker_message_id, recipient, subject, enqueued_at, NULL, publish_attempts, publish_error, NULL, NULL, NULL, 0,
  dropped_at, dropped_by, reason
FROM postroom.dropped_deliveries WHERE broker_message_id = ANY ($1)
ORDER BY enqueued_at, recipient LIMIT $2;

-- name: find_handled
-- What consumers did with the messages $2, each of the context $1 in its position, and with their replays.
SELECT inbox.*, wanted.message_id AS original
FROM unnest($1::text[], $2::text[]) AS wanted (context, message_id), LATERAL (
  SELECT * FROM postroom.inbox_messages AS same
  WHERE same.source_context = wanted.context AND same.message_id = wanted.message_id
  UNION ALL
  SELECT * FROM postroom.inbox_messages AS replayed
  WHERE replayed.source_context = wanted.context
    AND replayed.message_id > wanted.message_id || '~' AND replayed.message_id < wanted.message_id || E'\x7f'
) AS inbox
ORDER BY inbox.received_at, inbox.consumer LIMIT $3;

-- name: find_caused
-- Which messages of the contexts $2 consumers were given that say a message $1 caused them; by their cause.
SELECT DISTINCT causation_id, source_context, message_id FROM postroom.inbox_messages
WHERE source_context = ANY ($2::text[]) AND causation_id = ANY ($1::text[]) AND causation_id IS NOT NULL
  AND strpos(message_id, '~') = 0
ORDER BY message_id LIMIT $3;

-- name: find_letters
-- The dead letters of the same messages, and of their replays.
SELECT letter.id, letter.context, letter.died_at, letter.letter, letter.act, letter.settled_at, letter.settled_by, letter.why,
  wanted.message_id AS original
FROM unnest($1::text[], $2::text[]) AS wanted (context, message_id), LATERAL (
  SELECT * FROM postroom.dead_letters AS same
  WHERE same.context = wanted.context AND postroom.message_of_letter(same.letter_id) = wanted.message_id
  UNION ALL
  SELECT * FROM postroom.dead_letters AS replayed
  WHERE replayed.context = wanted.context
    AND postroom.message_of_letter(replayed.letter_id) > wanted.message_id || '~'
    AND postroom.message_of_letter(replayed.letter_id) < wanted.message_id || E'\x7f'
) AS letter
ORDER BY letter.died_at, letter.id LIMIT $3;

-- name: find_letter
-- The message whose dead letter has the number $1, in a context of $2.
SELECT postroom.message_of_letter(letter_id) FROM postroom.dead_letters WHERE id = $1 AND context = ANY ($2::text[]);

-- name: find_job
-- The job that has the id $1, or an activity of it.
SELECT id FROM ledger.job WHERE id = $1 UNION SELECT job_id FROM ledger.activity WHERE id = $1;

-- name: find_requests
-- What the activities of the job $1 asked for, in the order of their spawning; the first $2.
SELECT request.id, request.activity_id, request.asked, request.asks, request.due_at, request.answered_by
FROM ledger.activity JOIN ledger.request ON request.activity_id = activity.id
WHERE activity.job_id = $1 ORDER BY activity.spawned_at, activity.id LIMIT $2;
