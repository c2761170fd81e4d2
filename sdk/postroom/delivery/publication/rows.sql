-- The queries of publisher, record and operators for all tables that are published, in the words of a table's own file:
--
--     :table      the table; each query calls a row of it `item`
--     :key        the name of a row here, a text; `:is` says whether the row is the one with `wanted.key`
--     :identity   the message's id without its epoch
--     :subject    where it goes
--     :aggregate  the column whose rows are published one after the other, and `:place`, that of their order
--     :lock       the advisory lock of one aggregate
--     :owner      what an operator calls the aggregate, `:since` when the row was written, `:ours` whether it is of the
--                 context $1
--     :confirmed  whether consumers are known to have handled it
--     :ended      whether the row is settled: then it is neither published nor lost

\set settled (:ended OR postroom.is_settled(item.stream, item.stream_created_at, item.stream_sequence, :subject) OR :confirmed)
\set number stream_sequence, stream_created_at
\set found :key AS key, :number, NOT :settled AS lost
\set step (:number) > ($6::bigint, $7::timestamptz) AND published_at > $3 AND published_at NOT BETWEEN $4 AND clock_timestamp() ORDER BY :number LIMIT $5
\set nowhere published_at = NULL, stream = NULL, stream_created_at = NULL, stream_sequence = NULL

-- name: claim_aggregates
-- The first $2 aggregates after $1 whose oldest unpublished row is due, where the longest wait is $3, and of each whether this
-- transaction holds it now: the advisory lock is released with the transaction, after what it wrote can be seen. One index
-- probe per aggregate, however long its backlog. The other lock, which all publishers share, is what `await_marks`
-- (record.sql) waits for. Postgres ends a publisher that stands still with these locks; JetStream has less time than that for
-- all that it is asked meanwhile. Where there is something to publish, the transaction's commit does not wait for the disk,
-- since a mark that a crash takes back is made again (docs/contract/delivery.md#delivery-16), and its statements, which look
-- rows up by their keys, are not planned each time.
WITH RECURSIVE head AS (
  (
    SELECT item.:aggregate AS aggregate, item.next_attempt_at FROM :table AS item
    WHERE item.published_at IS NULL AND NOT :ended AND item.:aggregate > $1
    ORDER BY item.:aggregate, item.:place LIMIT 1
  )
  UNION ALL
  SELECT following.* FROM head, LATERAL (
    SELECT item.:aggregate AS aggregate, item.next_attempt_at FROM :table AS item
    WHERE item.published_at IS NULL AND NOT :ended AND item.:aggregate > head.aggregate
    ORDER BY item.:aggregate, item.:place LIMIT 1
  ) AS following
), due AS MATERIALIZED (
  SELECT aggregate FROM head WHERE postroom.is_due(next_attempt_at, $3::interval) LIMIT $2
)
SELECT aggregate, pg_try_advisory_xact_lock(:lock) AS claimed,
  (SELECT pg_advisory_xact_lock_shared(1, 0)) AS publishing,
  (SELECT set_config('synchronous_commit', 'off', true)) AS commits,
  (SELECT set_config('idle_in_transaction_session_timeout', '60s', true)) AS ends,
  (SELECT set_config('plan_cache_mode', 'force_generic_plan', true)) AS plans
FROM due;

-- name: waits
-- Whether anything is unpublished: one index probe.
SELECT EXISTS (SELECT FROM :table AS item WHERE item.published_at IS NULL AND NOT :ended);

-- name: mark_published
-- Notes where the server put the rows $1: streams $2, their creations $3 and the numbers in them $4. What was noted under
-- one of these numbers before is lost, since the stream gave out its number again: it is published again, unless it is
-- settled, or older than $5. But where that was the same stream, by its creation, either may be the lost one: a worker may
-- be stopped between the server's answer and this. So the new one is not noted, and published again too. Returns those.
WITH placed AS MATERIALIZED (
  SELECT * FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::bigint[]) AS ack (key, stream, created_at, sequence)
), holder AS MATERIALIZED (
  SELECT :key AS key, placed.key AS placed_key, item.stream_created_at = placed.created_at AS same_stream,
    item.published_at > now() - $5::interval AND NOT :settled AS lost
  FROM placed JOIN :table AS item
    ON item.stream = placed.stream AND item.stream_sequence = placed.sequence
      AND item.published_at IS NOT NULL AND :key <> placed.key
), requeued AS (
  UPDATE :table AS item SET :nowhere, epoch = item.epoch + 1, next_attempt_at = now()
  FROM (SELECT key FROM holder WHERE lost UNION SELECT placed_key FROM holder WHERE same_stream) AS wanted
  WHERE :is
), marked AS (
  UPDATE :table AS item
  SET published_at = clock_timestamp(), publish_attempts = publish_attempts + 1, publish_error = NULL,
    stream = wanted.stream, stream_created_at = wanted.created_at, stream_sequence = wanted.sequence
  FROM placed AS wanted
  WHERE :is AND NOT EXISTS (SELECT FROM holder WHERE same_stream AND holder.placed_key = wanted.key)
)
SELECT placed_key FROM holder WHERE same_stream;

-- name: mark_failed
-- Counts an attempt of the rows $1: why it was refused ($2; null: JetStream did not answer), and in how many seconds the next
-- one may be made ($3).
UPDATE :table AS item
SET publish_attempts = publish_attempts + 1, publish_error = wanted.error,
  next_attempt_at = clock_timestamp() + wanted.seconds * interval '1 second'
FROM unnest($1::text[], $2::text[], $3::float8[]) AS wanted (key, error, seconds)
WHERE :is;

-- name: backlog
-- What waits to be published in a context (null: in all), since when, and how much of it JetStream has refused.
SELECT count(*) AS count, min(:since) AS oldest_at, count(*) FILTER (WHERE publish_error IS NOT NULL) AS failing
FROM :table AS item
WHERE published_at IS NULL AND NOT :ended AND ($1::text IS NULL OR :ours);

-- name: find_behind_the_end
-- Rows with a number beyond $2, the last that the stream $1 gave out: a server lost its newest. Published between $3 and
-- $4, or under a clock that was ahead. The first $5 behind the place $6, $7, and of each whether it is lost: not settled.
-- Most may be settled, and to see that costs more than to find them.
SELECT :found FROM (SELECT * FROM :table WHERE stream = $1 AND stream_sequence > $2 AND :step) AS item ORDER BY :number;

-- name: find_before_the_beginning
-- Rows with a number before $2, the first that the stream $1 still holds: it was purged. The rest as above.
SELECT :found FROM (SELECT * FROM :table WHERE stream = $1 AND stream_sequence < $2 AND :step) AS item ORDER BY :number;

-- name: find_of_another_stream
-- Rows that went into a deleted stream $1, one that was created at another time than $2. The rest as above.
SELECT :found FROM (SELECT * FROM :table WHERE stream = $1 AND stream_created_at <> $2 AND :step) AS item ORDER BY :number;

-- name: newest_at
-- The row with the highest number from $3 to $4 of the stream $1, created at $2, but for the numbers $5.
SELECT :identity AS id, epoch, stream_sequence FROM :table AS item
WHERE stream = $1 AND stream_created_at = $2 AND stream_sequence BETWEEN $3 AND $4
  AND stream_sequence <> ALL ($5::bigint[]) AND published_at IS NOT NULL
ORDER BY stream_sequence DESC LIMIT 1;

-- name: find_taken_out
-- Rows of the work queue $1, created at $2, that are no longer in it: with a number before $3, its first, or one of $4.
-- Published after $5; the first $6 behind the place $7, $8, as above. The first condition is the floor of all subjects, for
-- the index.
SELECT :found
FROM (
  SELECT * FROM :table
  WHERE stream = $1 AND stream_created_at = $2
    AND stream_sequence > coalesce((
      SELECT floor FROM postroom.work_queue_floors AS known
      WHERE known.stream = $1 AND known.stream_created_at = $2 AND known.filter = '>'
    ), 0)
    AND (:number) > ($7::bigint, $8::timestamptz)
    AND (stream_sequence < $3 OR stream_sequence = ANY ($4::bigint[]))
    AND published_at > $5
  ORDER BY :number LIMIT $6
) AS item ORDER BY :number;

-- name: find_stretch
-- When the last of the first $4 rows was published of those between $1 and $2 into the stream $3 (null: any), settled ones
-- too; no row where there are fewer.
SELECT published_at FROM :table AS item
WHERE published_at > $1 AND published_at <= $2 AND ($3::text IS NULL OR stream = $3) AND NOT :ended
ORDER BY published_at OFFSET $4 - 1 LIMIT 1;

-- name: has_stream
-- Whether a row is published into the stream $1.
SELECT EXISTS (SELECT FROM :table AS item WHERE published_at IS NOT NULL AND stream = $1);

-- name: find_since
-- Rows published between $1 and $2 into the stream $3 (null: any), settled ones too if $4.
SELECT :key FROM :table AS item
WHERE published_at > $1 AND published_at <= $2 AND ($3::text IS NULL OR stream = $3)
  AND NOT :ended AND ($4 OR NOT :settled);

-- name: find_unsettled
-- Those of the rows $1 that are published, and not settled.
SELECT wanted.key FROM unnest($1::text[]) AS wanted (key) JOIN :table AS item ON :is
WHERE item.published_at IS NOT NULL AND NOT :settled;

-- name: requeue
-- Makes the published rows $1 unpublished again, under the next epoch.
UPDATE :table AS item SET :nowhere, epoch = item.epoch + 1, next_attempt_at = now()
FROM unnest($1::text[]) AS wanted (key)
WHERE :is AND item.published_at IS NOT NULL;

-- name: list_failing
-- The rows that JetStream has refused, oldest first: of the context $1 (null: all), at most $2. `behind` counts the rows of
-- the same aggregate that wait for it.
SELECT :key AS id, :subject AS subject, :owner AS aggregate, publish_attempts AS attempts, publish_error AS error,
  :since AS occurred_at, next_attempt_at, (
    SELECT count(*) FROM :table AS other
    WHERE other.published_at IS NULL AND other.:aggregate = item.:aggregate AND other.:place > item.:place
  ) AS behind
FROM :table AS item
WHERE published_at IS NULL AND publish_error IS NOT NULL AND NOT :ended AND ($1::text IS NULL OR :ours)
ORDER BY :since, item.:place, item.:aggregate LIMIT $2;

-- name: find_failing
-- Which rows JetStream has refused, by key: of the context $1, with the subject $2, older than $3 seconds, from before
-- the time $7, of the keys $4, behind the key $5, each of which may be null; at most $6.
SELECT :key AS id FROM :table AS item
WHERE published_at IS NULL AND publish_error IS NOT NULL AND NOT :ended AND ($1::text IS NULL OR :ours)
  AND ($2::text IS NULL OR :subject = $2)
  AND coalesce(:since < least(now() - $3::float8 * interval '1 second', $7::timestamptz), true)
  AND ($4::text[] IS NULL OR :key = ANY ($4)) AND ($5::text IS NULL OR :key > $5)
ORDER BY 1 LIMIT $6;
