-- The record of dead letters: keeping one, and what an operator sees and does. Publishing them is publication/letters.sql.

-- name: keep
-- One more letter: context, id, subject, time, the letter, its payload; the same death a second time changes nothing.
INSERT INTO postroom.dead_letters (context, letter_id, subject, died_at, letter, payload)
VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (context, letter_id) DO NOTHING;

-- name: list_letters
-- $5 unsettled letters of the context $1, oldest first, after the one of time $3 and number $4; with their payloads if $2.
SELECT id, died_at, letter, CASE WHEN $2 THEN payload END AS payload FROM postroom.dead_letters
WHERE context = $1 AND settled_at IS NULL AND (died_at, id) > ($3, $4::bigint) ORDER BY died_at, id LIMIT $5;

-- name: find_letters
-- The unsettled ones of the letters $2, or of the messages $3, that are of the context $1; with their payloads if $4.
SELECT id, died_at, letter, CASE WHEN $4 THEN payload END AS payload FROM postroom.dead_letters
WHERE context = $1 AND settled_at IS NULL
  AND (id = ANY ($2::bigint[]) OR postroom.message_of_letter(letter_id) = ANY ($3::text[]));

-- name: list_known
-- Which of the letters $2 of the context $1 the record has, settled ones too.
SELECT letter_id FROM postroom.dead_letters WHERE context = $1 AND letter_id = ANY ($2::text[]);

-- name: last_letter
-- The number of the last letter, 0 without one.
SELECT coalesce(max(id), 0) FROM postroom.dead_letters;

-- name: is_known
-- Whether the record has ever had a letter of the context $1.
SELECT EXISTS (SELECT FROM postroom.dead_letters WHERE context = $1);

-- name: count_letters
-- How many unsettled letters each context has.
SELECT context, count(*) AS letters FROM postroom.dead_letters WHERE settled_at IS NULL GROUP BY context ORDER BY context;

-- name: count_placed
-- How many unsettled letters were published into the stream $1 that was created at $2, under numbers from $3 to $4.
SELECT count(*) FROM postroom.dead_letters
WHERE stream = $1 AND stream_created_at = $2 AND stream_sequence BETWEEN $3 AND $4
    AND published_at IS NOT NULL AND settled_at IS NULL;

-- name: find_gaps
-- From which to which number, from $3 to $4, the stream $1 that was created at $2 has none of them; at most $5 such parts.
WITH placed AS (
  SELECT $3::bigint - 1 AS number
  UNION ALL
  SELECT stream_sequence FROM postroom.dead_letters
  WHERE stream = $1 AND stream_created_at = $2 AND stream_sequence BETWEEN $3 AND $4
    AND published_at IS NOT NULL AND settled_at IS NULL
), neighbours AS (SELECT number, lead(number, 1, $4::bigint + 1) OVER (ORDER BY number) AS next FROM placed)
SELECT number + 1, next - 1 FROM neighbours WHERE next > number + 1 ORDER BY 1 LIMIT $5;

-- name: lock_letters
-- The unsettled ones of the letters $1, locked by this transaction.
SELECT id, letter, payload, letter_id, stream, stream_sequence FROM postroom.dead_letters
WHERE id = ANY ($1::bigint[]) AND settled_at IS NULL ORDER BY id FOR UPDATE;

-- name: settle
-- The letters $1 were $2 (an act) by $3, because of $4; their payloads go.
UPDATE postroom.dead_letters
SET act = $2, settled_at = clock_timestamp(), settled_by = $3, why = $4, payload = NULL WHERE id = ANY ($1::bigint[]);

-- name: settle_unrecorded
-- The same of letters of the context $1 that have no row, and get one: ids, subjects, times and letters $2 to $5, then act,
-- actor and reason. No row where that was done before.
INSERT INTO postroom.dead_letters (context, letter_id, subject, died_at, letter, act, settled_at, settled_by, why)
SELECT $1, letter_id, subject, died_at, letter, $6, clock_timestamp(), $7, $8
FROM unnest($2::text[], $3::text[], $4::timestamptz[], $5::bytea[]) AS one (letter_id, subject, died_at, letter)
ON CONFLICT (context, letter_id) DO NOTHING RETURNING letter_id;

-- name: forget_unrecorded
-- Take back the rows that this transaction gave the letters $2 of the context $1.
DELETE FROM postroom.dead_letters WHERE context = $1 AND letter_id = ANY ($2::text[]);

-- name: find_settled
-- What was done with letters of the context $1, the latest last: of the numbers $2, or of the ids, or messages, $3.
SELECT id::text, letter_id, postroom.message_of_letter(letter_id), act, settled_by, settled_at
FROM postroom.dead_letters
WHERE context = $1 AND settled_at IS NOT NULL
  AND (id = ANY ($2::bigint[]) OR letter_id = ANY ($3::text[]) OR postroom.message_of_letter(letter_id) = ANY ($3::text[]))
ORDER BY settled_at, id;

-- name: list_settled
-- What operators did with letters of the context $1, the latest $2, oldest first.
SELECT letter, act, settled_at, settled_by, why FROM (
  SELECT * FROM postroom.dead_letters WHERE context = $1 AND settled_at IS NOT NULL ORDER BY settled_at DESC, id DESC LIMIT $2
) AS latest ORDER BY settled_at, id;
