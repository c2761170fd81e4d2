-- What benchmarks set and fill in Postgres.

-- name: emit
-- $4 events with the payload $3 in the mesh $1, spread over $2 aggregates, all in one transaction.
SELECT count(postroom.emit($1, 'order', 'order-' || number % $2, 'placed', $3::jsonb))
FROM generate_series(1, $4) AS number

-- name: delay_commits
-- Every commit takes 10 ms longer, as on a disk of another machine; those that wait at once share it.
ALTER ROLE CURRENT_USER SET commit_delay = 10000;
ALTER ROLE CURRENT_USER SET commit_siblings = 0;
