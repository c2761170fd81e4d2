-- What is asked of the HTTP handler's inbox beside its claims (claims.sql).

-- name: backlog
-- How many messages of the consumer $1 are neither processed nor dead, and since when, of those whose subjects match one of the
-- regular expressions $2 (docs/contract/delivery.md#delivery-34).
SELECT count(*), min(received_at)
FROM postroom.inbox_messages
WHERE processed_at IS NULL AND dead_at IS NULL AND consumer = $1 AND subject ~ ANY ($2::text[]);

-- name: begun
-- How many messages of each consumer and subject are neither processed nor dead, and an error of those whose handler was
-- unreachable when they were tried last, unless that is longer ago than $2: then nobody has them any more. $1: the codes that
-- such an error begins with.
SELECT consumer, subject, count(*), max(last_error) FILTER (
  WHERE split_part(last_error, ':', 1) = ANY ($1::text[]) AND begun_at > clock_timestamp() - $2::interval
)
FROM postroom.inbox_messages
WHERE processed_at IS NULL AND dead_at IS NULL
GROUP BY consumer, subject
ORDER BY consumer, subject;

-- name: sweep
-- Deletes up to $4 rows of the consumer $1 that ended longer than $2 ago, and before $3, the age of the oldest message
-- that the stream still holds (null: none).
WITH old AS (
  SELECT source_context, message_id, consumer FROM postroom.inbox_messages
  WHERE consumer = $1 AND received_at < least(now() - $2::interval, $3::timestamptz)
    AND coalesce(processed_at, dead_at) < least(now() - $2::interval, $3::timestamptz)
  LIMIT $4 FOR UPDATE SKIP LOCKED
)
DELETE FROM postroom.inbox_messages AS known USING old
WHERE (known.source_context, known.message_id, known.consumer) = (old.source_context, old.message_id, old.consumer);
