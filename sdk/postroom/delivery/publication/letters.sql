-- Dead letters as they are published, in the words of rows.sql: each is an aggregate of its own, since they have no order.
-- What an operator has settled is neither published nor lost.

\set table postroom.dead_letters
\set key item.id::text
\set is item.id = wanted.key::bigint
\set identity item.letter_id
\set subject item.subject
\set aggregate id
\set place id
\set lock hashint8extended(aggregate, 3)
\set owner item.context
\set since item.died_at
\set ours item.context = $1
\set confirmed FALSE
\set ended item.settled_at IS NOT NULL

-- name: claim
-- The first $2 of the letters $1, of $3 bytes at most (one at least); $4 is the longest wait.
WITH locked AS MATERIALIZED (
  SELECT id, letter_id, subject, letter, payload, epoch, publish_attempts FROM postroom.dead_letters
  WHERE id = ANY ($1::bigint[]) AND published_at IS NULL AND settled_at IS NULL AND postroom.is_due(next_attempt_at, $4::interval)
  ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED
), measured AS (
  SELECT locked.*, sum(octet_length(letter) + octet_length(payload)) OVER (ORDER BY id)
    - octet_length(letter) - octet_length(payload) AS bytes_before
  FROM locked
)
SELECT id AS aggregate, 1 AS place, letter_id, subject, letter, payload, epoch, publish_attempts
FROM measured WHERE bytes_before < $3 ORDER BY id;

-- name: list_contexts
-- The contexts with letters that wait for their stream.
SELECT DISTINCT context FROM postroom.dead_letters WHERE published_at IS NULL AND settled_at IS NULL ORDER BY context;
