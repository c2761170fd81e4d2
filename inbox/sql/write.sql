-- name: create_file
-- The file's own row, once; a file that takes the place of a damaged one is due to be refilled.
INSERT INTO inbox_file (only, id, created_at, refill_after) VALUES (1, :id, :created_at, :refill_after)
ON CONFLICT DO NOTHING;

-- name: first_position
-- Positions begin at the time of creation, in µs: beyond all that a file before this one can have given.
INSERT INTO sqlite_sequence (name, seq)
SELECT 'inbox', :created_at * 1000 WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'inbox');

-- name: file
-- A received message, unless it is here or has been.
INSERT INTO inbox (
    mesh, sender, client_message_id, broker_message_id, history_id, destination, received_at, message
)
SELECT :mesh, :sender, :client_message_id, :broker_message_id, :history_id, :destination, :received_at, :message
WHERE :history_id > coalesce((SELECT history_id FROM pruned WHERE mesh = :mesh), 0)
ON CONFLICT DO NOTHING;

-- name: refilled_to
-- How far a refill has come; NULL once it is done.
UPDATE inbox_file SET refill_after = :refill_after WHERE refill_after IS NOT NULL;

-- name: delivered_to
-- Note up to which delivery of a consumer the file has everything.
UPDATE consumers SET delivered = :delivered WHERE name = :name AND delivered < :delivered;

-- name: begin_opening
-- Note that the file was opened for a consumer. Deliveries of a new one count from one, and those of an older one from where it is.
INSERT INTO consumers (name, created, opening, opening_before) VALUES (:name, :created, :new_opening, :opening)
ON CONFLICT (name) DO UPDATE SET
    delivered = iif(created = excluded.created, min(delivered, :delivered), 0),
    created = excluded.created, opening = excluded.opening, opening_before = excluded.opening_before;

-- name: begin_again
-- Make an older copy a file of its own.
UPDATE inbox_file SET id = :id;

-- name: refill
-- What the file lacks has to come from the broker's history.
UPDATE inbox_file SET refill_after = 0;

-- name: pass_positions
-- Continue above the positions that were given since the copy was made, also where the clock is behind: a delivery takes one at most.
UPDATE sqlite_sequence SET seq = max(seq + :acknowledged, :now * 1000) WHERE name = 'inbox';

-- name: old
-- The last position of the oldest messages that were received before a moment, some at a time; NULL where there is none.
SELECT max(position) FROM (
    SELECT position FROM inbox WHERE received_at < :before ORDER BY received_at, position LIMIT :limit
);

-- name: note_pruned
-- Remember of each mesh which messages go. (`+`: by position, since the others lead through everything that is old.)
INSERT INTO pruned (mesh, history_id, position)
SELECT mesh, max(history_id), max(position) FROM inbox WHERE +received_at < :before AND position <= :last GROUP BY +mesh
ON CONFLICT (mesh) DO UPDATE
SET history_id = max(history_id, excluded.history_id), position = max(position, excluded.position);

-- name: prune
-- Delete old messages, found in the same way.
DELETE FROM inbox WHERE +received_at < :before AND position <= :last;
