-- How many messages waited for each durable consumer, minute by minute (docs/contract/operate.md#operate-71).

-- name: keep_waiting
-- For the consumers $2 of the streams $1, $3 messages wait in the current minute; does not wait for the disk.
WITH lazily AS MATERIALIZED (
  SELECT set_config('synchronous_commit', 'off', true)
)
INSERT INTO postroom.minute_waiting (minute, stream, consumer, waiting)
SELECT date_trunc('minute', now()), seen.stream, seen.consumer, seen.waiting
FROM lazily, unnest($1::text[], $2::text[], $3::bigint[]) AS seen (stream, consumer, waiting)
ORDER BY seen.stream, seen.consumer
ON CONFLICT (minute, stream, consumer) DO UPDATE SET waiting = excluded.waiting;

-- name: list_waiting
-- What waited in the streams $1 in the last $2 minutes, and how many minutes ago.
SELECT stream, consumer, (extract(epoch FROM date_trunc('minute', now()) - minute) / 60)::integer AS ago, waiting
FROM postroom.minute_waiting
WHERE minute > date_trunc('minute', now()) - $2 * interval '1 minute' AND minute <= now() AND stream = ANY ($1::text[]);

-- name: sweep_waiting
-- Forgets up to $1 rows of minutes that are over for $2.
DELETE FROM postroom.minute_waiting WHERE (minute, stream, consumer) IN (
  SELECT minute, stream, consumer FROM postroom.minute_waiting WHERE minute < now() - $2::interval LIMIT $1
);
