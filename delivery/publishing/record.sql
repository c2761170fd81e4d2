-- name: now
-- The time of the database, by which it notes when something was published.
SELECT clock_timestamp();
