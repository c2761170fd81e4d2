-- name: now
-- The time of the database.
SELECT clock_timestamp();
