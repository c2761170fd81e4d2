-- The queries of the HTTP handler's inbox, each loaded by its name.
-- They take parallel arrays, a message in each position; positions of the result count from 1.

-- name: claim
-- Records what is new and begins an attempt of each message that is waiting or whose lease ran out; returns those.
-- An attempt that ended without a word leaves `ack_timeout` behind. A claim that is repeated, because its answer was
-- lost, has the same owner and counts once. Sorted, so that two consumers lock common rows in one order.
INSERT INTO postroom.inbox_messages AS known
  (consumer, source_context, message_id, subject, attempts, owner, leased_until)
SELECT $1, fresh.source_context, fresh.message_id, fresh.subject, 1, $2::uuid, clock_timestamp() + $3::interval
FROM unnest($4::text[], $5::text[], $6::text[]) AS fresh (source_context, message_id, subject)
ORDER BY fresh.source_context, fresh.message_id
ON CONFLICT (source_context, message_id, consumer) DO UPDATE SET
  attempts = known.attempts + CASE WHEN known.owner = excluded.owner THEN 0 ELSE 1 END,
  last_error = CASE WHEN known.owner <> excluded.owner THEN 'ack_timeout' ELSE known.last_error END,
  owner = excluded.owner,
  leased_until = excluded.leased_until
WHERE known.processed_at IS NULL AND known.dead_at IS NULL
  AND (known.owner IS NULL OR known.owner = excluded.owner OR known.leased_until <= clock_timestamp())
RETURNING source_context, message_id, attempts, last_error;

-- name: look_up
-- The state of each message that could not be claimed; a lease as the seconds that it has left.
SELECT
  known.source_context,
  known.message_id,
  known.processed_at IS NOT NULL,
  known.dead_reason,
  known.last_error,
  known.attempts,
  extract(epoch FROM known.leased_until - clock_timestamp())::float8
FROM unnest($2::text[], $3::text[]) AS wanted (source_context, message_id)
JOIN postroom.inbox_messages AS known USING (source_context, message_id)
WHERE known.consumer = $1;

-- name: settle
-- Ends attempts whose lease still holds: done, dead where there is a reason, else waiting again. What does not count was no
-- attempt: nobody was there to handle the message, or it was one too many to be made. Returns the position of each.
UPDATE postroom.inbox_messages AS known SET
  processed_at = CASE WHEN verdict.done THEN greatest(clock_timestamp(), known.received_at) END,
  dead_at = CASE WHEN verdict.reason IS NOT NULL THEN clock_timestamp() END,
  dead_reason = verdict.reason,
  attempts = known.attempts - CASE WHEN verdict.counts THEN 0 ELSE 1 END,
  last_error = coalesce(verdict.error, known.last_error),
  owner = NULL,
  leased_until = NULL
FROM unnest($2::text[], $3::text[], $4::uuid[], $5::boolean[], $6::text[], $7::text[], $8::boolean[]) WITH ORDINALITY
  AS verdict (source_context, message_id, owner, done, reason, error, counts, position)
WHERE known.consumer = $1
  AND known.source_context = verdict.source_context
  AND known.message_id = verdict.message_id
  AND known.owner = verdict.owner
  AND known.leased_until > clock_timestamp()
RETURNING verdict.position;

-- name: renew
-- Prolongs leases that still hold; returns the position of each.
UPDATE postroom.inbox_messages AS known SET leased_until = clock_timestamp() + $2::interval
FROM unnest($3::text[], $4::text[], $5::uuid[]) WITH ORDINALITY AS lease (source_context, message_id, owner, position)
WHERE known.consumer = $1
  AND known.source_context = lease.source_context
  AND known.message_id = lease.message_id
  AND known.owner = lease.owner
  AND known.leased_until > clock_timestamp()
RETURNING lease.position;

-- name: backlog
-- How many messages of a context are neither processed nor dead, and since when (docs/contract/delivery.md#delivery-34).
SELECT count(*), min(received_at)
FROM postroom.inbox_messages
WHERE processed_at IS NULL AND dead_at IS NULL AND source_context = $1 AND (consumer = $2 OR $2::text IS NULL);

-- name: unreachable
-- Which consumers have messages that nobody was there to handle when they were tried last, and an error of each; $1: the
-- codes that such an error begins with.
SELECT consumer, max(last_error) AS error
FROM postroom.inbox_messages
WHERE processed_at IS NULL AND dead_at IS NULL AND split_part(last_error, ':', 1) = ANY ($1::text[])
GROUP BY consumer
ORDER BY consumer;

-- name: sweep
-- Deletes up to $4 rows of the consumer $1 that ended longer than $2 ago, and before $3, the age of the oldest message
-- that the stream still holds (null: none); returns how many.
WITH old AS (
  SELECT source_context, message_id, consumer FROM postroom.inbox_messages
  WHERE consumer = $1 AND received_at < least(now() - $2::interval, $3::timestamptz)
    AND coalesce(processed_at, dead_at) < least(now() - $2::interval, $3::timestamptz)
  LIMIT $4 FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM postroom.inbox_messages AS known USING old
  WHERE (known.source_context, known.message_id, known.consumer) = (old.source_context, old.message_id, old.consumer)
  RETURNING 1
)
SELECT count(*) FROM gone;
