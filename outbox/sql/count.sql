-- name: count
-- Move the counters.
UPDATE tally
SET pending = pending + :pending, inflight = inflight + :inflight, done = done + :done, dead = dead + :dead,
    aborted = aborted + :aborted, payload_bytes = payload_bytes + :payload_bytes;
