-- name: count
-- Move the counters.
UPDATE tally
SET pending = pending + :pending, inflight = inflight + :inflight, done = done + :done, dead = dead + :dead,
    aborted = aborted + :aborted, payload_bytes = payload_bytes + :payload_bytes, moved = moved + :moved,
    waiting_room = waiting_room + :waiting_room, kept_room = kept_room + :kept_room;

-- name: space
-- The counters that an accept needs, and the newest row of the outbox beside the newest that was moved.
SELECT waiting_room, kept_room, moved,
       coalesce((SELECT max(seq) FROM outbox), 0), coalesce((SELECT max(seq) FROM outbox_settled), 0),
       coalesce((SELECT max(key) FROM outbox_settled_key), -1)
FROM tally;

-- name: dated
-- When the newest row was enqueued, 0 where there is none.
SELECT coalesce((SELECT enqueued_at FROM outbox ORDER BY seq DESC LIMIT 1), 0);
