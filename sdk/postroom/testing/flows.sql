-- The queries of a FlowCase. {name} and {template} are names of databases, which it chooses.

-- name: create_template
-- A database for the tables of the ledger and of the application.
CREATE DATABASE {name};

-- name: copy_template
-- The database of one run.
CREATE DATABASE {name} TEMPLATE {template};

-- name: drop
-- Removes a database, even with open connections.
DROP DATABASE IF EXISTS {name} WITH (FORCE);

-- name: find_job
-- What became of the job.
SELECT state, error FROM ledger.job WHERE id = $1;

-- name: end_leases_of_activities
-- Ends the leases of leg 1 that a dead worker had.
UPDATE ledger.activity SET leased_until = now() - interval '1 minute' WHERE owner IS NOT NULL;

-- name: end_leases_of_messages
-- Ends the leases of leg 2 that a dead worker had.
UPDATE ledger.guid SET leased_until = now() - interval '1 minute' WHERE owner IS NOT NULL;
