-- Reading and writing an agent's event store.

-- name: owner
-- Whose store this is; no row in a new one.
SELECT agent, tenant, workspace FROM state;

-- name: claim
-- Make a new store this agent's.
INSERT INTO state (only, agent, tenant, workspace, position, state_hash, logical_clock)
VALUES (1, ?, ?, ?, 0, zeroblob(32), 0);

-- name: head
-- Where the store stands.
SELECT position, state_hash, logical_clock FROM state;

-- name: read
-- The events after a position, oldest first.
SELECT position, CAST(record AS BLOB), state_hash FROM event WHERE position > ? ORDER BY position LIMIT ?;

-- name: find
-- Which of these messages, [idempotency_key, workspace, tenant] each, the store holds: the index in the list, the
-- position, the role.
SELECT wanted.key, event.position, event.role
FROM json_each(?) AS wanted
JOIN event ON event.idempotency_key = wanted.value ->> 0 AND event.workspace = wanted.value ->> 1
          AND event.tenant = wanted.value ->> 2 AND event.cause IS NULL;

-- name: find_cause
-- The position of the message that came in with the id or key :id, else of the one that caused what went out with it.
SELECT coalesce(
    (SELECT position FROM event WHERE idempotency_key = :id AND cause IS NULL),
    (SELECT coalesce(cause, position) FROM event WHERE record ->> '$.envelope.id' = :id)
);

-- name: story
-- The event at a position and those after it, the first of which it caused; and where each is published.
SELECT CAST(record AS BLOB), outgoing.position IS NOT NULL, epoch, published_at, stream, stream_sequence
FROM event LEFT JOIN outgoing USING (position) WHERE event.position >= ? ORDER BY event.position LIMIT ?;

-- name: letters_of
-- The dead letters of a message, and when each was published.
SELECT letter_id, record, published_at FROM letter JOIN outgoing USING (position)
WHERE CAST(record AS TEXT) ->> '$.message_id' = :id ORDER BY position DESC;

-- name: attempt_of
-- How many attempts at a message failed, why the last one did, and when.
SELECT attempts, last_error, failed_at FROM attempt WHERE message_id = ?;

-- name: versions
-- How often each of these entities was changed; none that never was.
SELECT entity.id, entity.version FROM json_each(?) AS wanted JOIN entity ON entity.id = wanted.value;

-- name: unpublished_of
-- What the messages at these positions caused that is not marked published.
SELECT outgoing.position, outgoing.epoch, CAST(event.record AS BLOB), NULL
FROM json_each(?) AS wanted
JOIN outgoing ON outgoing.cause = wanted.value AND outgoing.published_at IS NULL
JOIN event ON event.position = outgoing.position
ORDER BY outgoing.position;

-- name: unpublished
-- Everything that is not marked published, oldest first; of a letter also its subject.
SELECT outgoing.position, outgoing.epoch, coalesce(CAST(event.record AS BLOB), letter.record), letter.subject
FROM outgoing INDEXED BY outgoing_unpublished LEFT JOIN event ON event.position = outgoing.position
LEFT JOIN letter ON letter.position = outgoing.position
WHERE outgoing.published_at IS NULL ORDER BY outgoing.position;

-- name: lost
-- What was lost and is not published again yet, and letters that never were published, after a position, oldest first.
SELECT outgoing.position, outgoing.epoch, coalesce(CAST(event.record AS BLOB), letter.record), letter.subject
FROM (
  SELECT position, epoch FROM outgoing INDEXED BY outgoing_unpublished
  WHERE published_at IS NULL AND (epoch > 0 OR position < 0) AND position > ?
  ORDER BY position LIMIT ?
) AS outgoing
LEFT JOIN event ON event.position = outgoing.position
LEFT JOIN letter ON letter.position = outgoing.position
ORDER BY outgoing.position;

-- name: append
-- One more event.
INSERT INTO event (position, record, state_hash) VALUES (?, ?, ?);

-- name: advance
-- The state is at a new position.
UPDATE state SET position = ?, state_hash = ?, logical_clock = ?;

-- name: count_change
-- The version of an entity that was changed.
INSERT INTO entity (id, version) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET version = excluded.version;

-- name: mark_published
-- JetStream has this message; one that was marked before, or was lost meanwhile, stays as it is.
UPDATE outgoing SET published_at = :now, stream = :stream, stream_created_at = :created_at, stream_sequence = :sequence
WHERE position = :position AND epoch = :epoch AND published_at IS NULL;

-- name: requeue_displaced
-- The stream of this message, which was just marked, had given its number to another before, and lost one of the two.
-- Which one is unknown, since the process that published this one may have been stopped before it marked it. So both count
-- as lost.
UPDATE outgoing
SET published_at = NULL, epoch = epoch + 1, stream = NULL, stream_created_at = NULL, stream_sequence = NULL
WHERE stream = :stream AND stream_created_at = :created_at AND stream_sequence = :sequence AND EXISTS (
  SELECT 1 FROM outgoing AS other
  WHERE other.stream = :stream AND other.stream_created_at = :created_at AND other.stream_sequence = :sequence
    AND other.position <> :position
);

-- name: find_of_another_stream
-- What is noted in this stream as it was created at another time, and was published before then: in the same millisecond
-- it may have been published after the stream was read. What seems to be published a minute later was published under a
-- clock that was ahead. (With an OR it would read all that is noted in the stream.)
SELECT position, published_at FROM outgoing
WHERE stream = :stream AND stream_created_at < :created_at AND published_at NOT BETWEEN :until AND :until + 60000
UNION ALL
SELECT position, published_at FROM outgoing
WHERE stream = :stream AND stream_created_at > :created_at AND published_at NOT BETWEEN :until AND :until + 60000;

-- name: find_behind_the_end
-- What is noted after the last number of this stream. The rest as above.
SELECT position, published_at FROM outgoing
WHERE stream = :stream AND stream_created_at = :created_at AND stream_sequence > :number
  AND published_at NOT BETWEEN :until AND :until + 60000;

-- name: find_before_the_beginning
-- What is noted before the first number of this stream. The rest as above.
SELECT position, published_at FROM outgoing
WHERE stream = :stream AND stream_created_at = :created_at AND stream_sequence < :number
  AND published_at NOT BETWEEN :until AND :until + 60000;

-- name: newest_at
-- What has the highest of these numbers of this stream, from the first to the last, but for some.
SELECT coalesce(event.idempotency_key, letter.letter_id), outgoing.epoch, outgoing.stream_sequence
FROM outgoing LEFT JOIN event ON event.position = outgoing.position
LEFT JOIN letter ON letter.position = outgoing.position
WHERE outgoing.stream = ? AND outgoing.stream_created_at = ? AND outgoing.stream_sequence BETWEEN ? AND ?
  AND outgoing.stream_sequence NOT IN (SELECT value FROM json_each(?))
ORDER BY outgoing.stream_sequence DESC LIMIT 1;

-- name: find_since
-- The messages that were published from a time on, wherever they are noted.
SELECT position FROM outgoing WHERE published_at >= ? AND position > 0;

-- name: log_operation
-- One more line of the operator log.
INSERT INTO operator_log (at, actor, verb, subject, reason) VALUES (?, ?, ?, ?, ?);

-- name: requeue
-- These messages are lost: they are unpublished again, under the next epoch.
UPDATE outgoing
SET published_at = NULL, epoch = epoch + 1, stream = NULL, stream_created_at = NULL, stream_sequence = NULL
WHERE position IN (SELECT value FROM json_each(?)) AND published_at IS NOT NULL;

-- name: forget_place
-- These messages left their stream, as they should.
UPDATE outgoing SET stream = NULL, stream_created_at = NULL, stream_sequence = NULL
WHERE position IN (SELECT value FROM json_each(?));

-- name: has_place
-- Whether anything is noted in this stream.
SELECT EXISTS (SELECT 1 FROM outgoing WHERE stream = ? AND stream_created_at = ?);

-- name: forget_places
-- The messages with these numbers left this stream, as they should.
UPDATE outgoing SET stream = NULL, stream_created_at = NULL, stream_sequence = NULL
WHERE stream = ? AND stream_created_at = ? AND stream_sequence IN (SELECT value FROM json_each(?));

-- name: prune
-- Forget, of the oldest published messages (so many), those that were published before a moment. One that was published
-- again since stays, and takes up a place among these.
DELETE FROM outgoing WHERE position IN (
  SELECT position FROM outgoing WHERE position > 0 AND published_at IS NOT NULL ORDER BY position LIMIT :most
) AND published_at < :before;

-- name: prune_letters
-- Forget the dead letters that were published before a moment.
DELETE FROM outgoing WHERE position < 0 AND published_at < ?;

-- name: keep_letter
-- One more dead letter, unless it is known: its id, its subject, the letter.
INSERT INTO letter (position, letter_id, subject, record)
SELECT coalesce(min(position), 0) - 1, ?, ?, ? FROM letter WHERE TRUE ON CONFLICT (letter_id) DO NOTHING;

-- name: find_letter
-- A dead letter that is not marked published, by its id.
SELECT letter.position, outgoing.epoch, letter.record, letter.subject
FROM letter JOIN outgoing ON outgoing.position = letter.position
WHERE letter.letter_id = ? AND outgoing.published_at IS NULL;

-- name: attempts
-- The failed attempts at these messages: how many of each, and why the last one failed.
SELECT attempt.message_id, attempt.attempts, attempt.last_error
FROM json_each(?) AS wanted JOIN attempt ON attempt.message_id = wanted.value;

-- name: count_attempt
-- An attempt failed; noting the same one again changes nothing.
INSERT INTO attempt (message_id, attempts, last_error, failed_at) VALUES (?, ?, ?, ?)
ON CONFLICT (message_id) DO UPDATE
SET attempts = excluded.attempts, last_error = excluded.last_error, failed_at = excluded.failed_at
WHERE excluded.attempts > attempt.attempts;

-- name: forget_attempts
-- These messages were handled.
DELETE FROM attempt WHERE message_id IN (SELECT value FROM json_each(?));

-- name: forget_old_attempts
-- Nothing failed since then: the message left its stream long ago.
DELETE FROM attempt WHERE failed_at < ?;
