-- What a benchmark of the publisher begins with.

-- name: emit
-- $4 events with the payload $3 in the mesh $1, spread over $2 aggregates, all in one transaction.
SELECT count(postroom.emit($1, 'order', 'order-' || number % $2, 'placed', $3::jsonb))
FROM generate_series(1, $4) AS number
