-- name: await_marks
-- Waits half a second at most for the publishers that have published already to have their marks committed. Those that
-- publish later wait for this transaction, which is one message to Postgres: no program can stand still within it.
SELECT set_config('lock_timeout', '500ms', true);
SELECT pg_advisory_xact_lock(1, 0);

-- name: begin_publish
-- Begins a publish in this transaction, for which `await_marks` waits; claims do the same (rows.sql).
SELECT pg_advisory_xact_lock_shared(1, 0), set_config('idle_in_transaction_session_timeout', '60s', true);

-- name: raise_floors
-- Notes what was acknowledged of the work queue $1, created at $2: subjects $3, the same as expressions $4, floors $5.
INSERT INTO postroom.work_queue_floors AS known (stream, stream_created_at, filter, pattern, floor)
SELECT $1, $2, seen.* FROM unnest($3::text[], $4::text[], $5::bigint[]) AS seen (filter, pattern, floor)
ON CONFLICT (stream, stream_created_at, filter) DO UPDATE
SET floor = greatest(known.floor, excluded.floor), seen_at = now();

-- name: note_holes
-- Notes that the numbers $4 (ranges) of the work queue $1, created at $2, were acknowledged; those before its first number,
-- $3, are below its floor already.
INSERT INTO postroom.work_queue_holes AS known (stream, stream_created_at, numbers)
VALUES ($1, $2, $4::text::int8multirange)
ON CONFLICT (stream, stream_created_at) DO UPDATE
SET numbers = (known.numbers + excluded.numbers) * int8multirange(int8range($3::bigint, NULL))
WHERE NOT known.numbers @> excluded.numbers;

-- name: note_consumers
-- Notes how far the consumers $3 of the stream $1, created at $2, have acknowledged it: their filters as expressions $4,
-- floors $5. Others that it had are deleted by now, and do not come back.
WITH gone AS (
  DELETE FROM postroom.consumer_floors WHERE stream = $1 AND consumer IN (
    SELECT consumer FROM postroom.consumer_floors
    WHERE stream = $1 AND stream_created_at = $2 AND consumer <> ALL ($3::text[])
  )
)
INSERT INTO postroom.consumer_floors AS known (stream, stream_created_at, consumer, pattern, floor)
SELECT $1, $2, seen.* FROM unnest($3::text[], $4::text[], $5::bigint[]) AS seen (consumer, pattern, floor) ORDER BY 3
ON CONFLICT (stream, stream_created_at, consumer) DO UPDATE
SET pattern = excluded.pattern, floor = excluded.floor, seen_at = now();

-- name: forget_consumers
-- Deletes what is known of consumers that were last seen before $1.
DELETE FROM postroom.consumer_floors WHERE seen_at < $1;

-- name: forget_floors
-- Deletes the floors of streams that were last seen before $1.
DELETE FROM postroom.work_queue_floors AS known WHERE NOT EXISTS (
  SELECT FROM postroom.work_queue_floors AS same
  WHERE same.stream = known.stream AND same.stream_created_at = known.stream_created_at AND same.seen_at >= $1
);

-- name: forget_holes
-- Deletes the holes of streams whose floors are deleted.
DELETE FROM postroom.work_queue_holes AS known WHERE NOT EXISTS (
  SELECT FROM postroom.work_queue_floors AS floors
  WHERE floors.stream = known.stream AND floors.stream_created_at = known.stream_created_at
);

-- name: declare_subjects
-- Notes the subjects $1, the same as expressions $2: a stream is declared for them.
INSERT INTO postroom.declared_subjects (subjects, pattern)
SELECT * FROM unnest($1::text[], $2::text[]) ON CONFLICT (subjects) DO NOTHING;

-- name: is_declared
-- Whether a stream is declared for subjects of the context $1.
SELECT EXISTS (
  SELECT FROM postroom.declared_subjects WHERE starts_with(subjects, $1 || '.') OR starts_with(subjects, 'cmd.' || $1 || '.')
);
