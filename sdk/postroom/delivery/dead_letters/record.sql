-- The record of dead letters: keeping one, and what an operator asks and does. Publishing them is publishing/letters.sql.

-- name: keep
-- One more letter: context, id, subject, time, the letter, its payload; the same death a second time changes nothing.
INSERT INTO postroom.dead_letters (context, letter_id, subject, died_at, letter, payload)
VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (context, letter_id) DO NOTHING;

-- name: list_letters
-- $5 letters of the context $1 that nobody has settled, oldest first, from behind the one of time $3 and number $4 on;
-- with their payloads if $2.
SELECT id, died_at, letter, CASE WHEN $2 THEN payload END AS payload FROM postroom.dead_letters
WHERE context = $1 AND settled_at IS NULL AND (died_at, id) > ($3, $4::bigint) ORDER BY died_at, id LIMIT $5;

-- name: find_letters
-- Those of the letters $2 that are of the context $1 and that nobody has settled; with their payloads if $3.
SELECT id, died_at, letter, CASE WHEN $3 THEN payload END AS payload FROM postroom.dead_letters
WHERE context = $1 AND settled_at IS NULL AND id = ANY ($2::bigint[]);

-- name: list_known
-- Which letters of the context $1 the record has, settled ones too.
SELECT letter_id FROM postroom.dead_letters WHERE context = $1;

-- name: count_letters
-- How many letters of each context nobody has settled.
SELECT context, count(*) AS letters FROM postroom.dead_letters WHERE settled_at IS NULL GROUP BY context ORDER BY context;

-- name: lock_letter
-- The letter $1, which is this transaction's now; no row where somebody has settled it.
SELECT letter, payload, letter_id, stream, stream_sequence FROM postroom.dead_letters
WHERE id = $1 AND settled_at IS NULL FOR UPDATE;

-- name: settle
-- The letter $1 was $2 (an act) by $3, because of $4; its payload goes.
UPDATE postroom.dead_letters
SET act = $2, settled_at = clock_timestamp(), settled_by = $3, why = $4, payload = NULL WHERE id = $1;

-- name: settle_unrecorded
-- The same of a letter that has no row, and gets one: context, id, subject, time and letter $1 to $5, then act, actor and
-- reason. No row where somebody did that before.
INSERT INTO postroom.dead_letters (context, letter_id, subject, died_at, letter, act, settled_at, settled_by, why)
VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp(), $7, $8) ON CONFLICT (context, letter_id) DO NOTHING RETURNING id;

-- name: list_settled
-- What operators did with letters of the context $1, oldest first.
SELECT letter, act, settled_at, settled_by, why FROM postroom.dead_letters
WHERE context = $1 AND settled_at IS NOT NULL ORDER BY settled_at, id;
