-- name: file
-- The file's id, how far a refill has come where one is due, and whether it has had a consumer.
SELECT id, refill_after, EXISTS (SELECT 1 FROM consumers) FROM inbox_file;

-- name: consumer
-- When a consumer was created, up to which of its deliveries the file has everything, and the openings that NATS may have noted.
SELECT created, delivered, opening, opening_before FROM consumers WHERE name = :name;

-- name: newest
-- The last position that was given.
SELECT seq FROM sqlite_sequence WHERE name = 'inbox';

-- name: deleted_to
-- The last position that retention has deleted; NULL where it has deleted none.
SELECT max(position) FROM pruned;

-- name: since
-- The position before the first message received at a moment or later; NULL where there is none. (`+`: by the index of times,
-- since the order of positions leads through every message before it.)
SELECT min(+position) - 1 FROM inbox WHERE received_at >= :since;

-- name: page
-- Messages after a position, in order.
SELECT position, received_at, message FROM inbox WHERE position > :after ORDER BY position LIMIT :limit;

-- name: page_of_sender
-- The same, from one sender.
SELECT position, received_at, message FROM inbox
WHERE sender = :sender AND position > :after AND (:destination IS NULL OR destination = :destination)
ORDER BY position LIMIT :limit;

-- name: page_of_destination
-- The same, to one destination.
SELECT position, received_at, message FROM inbox
WHERE destination = :destination AND position > :after ORDER BY position LIMIT :limit;

-- name: received
-- Where a message lies that a member of the mesh sent under this id, when it was received, and as what the broker knows it.
SELECT position, received_at, broker_message_id FROM inbox
WHERE mesh = :mesh AND sender = :sender AND client_message_id = :client_message_id;
