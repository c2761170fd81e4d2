-- name: pragmas
-- How a connection behaves. A rollback journal, not a WAL: several processes write, and in the SQLite of common Pythons a
-- checkpoint beside a writer can corrupt a WAL.
PRAGMA busy_timeout = 5000;      -- ms
PRAGMA journal_mode = TRUNCATE;
PRAGMA synchronous = EXTRA;      -- what was answered is on disk

-- name: wait_briefly
-- From the opening on each step is tried again as a whole (`patiently`), instead of in SQLite's longer and longer pauses.
PRAGMA busy_timeout = 5;         -- ms

-- name: purge
-- Delete the keys that ended before a moment, the oldest first.
DELETE FROM idempotency_keys
WHERE (tenant, topic, consumer_group, key) IN (
    SELECT tenant, topic, consumer_group, key
    FROM idempotency_keys
    WHERE coalesce(lease_until, settled_at) < :before
    ORDER BY coalesce(lease_until, settled_at)
    LIMIT :limit
)
RETURNING 1;

-- name: find
-- The keys that are wanted, latest end (or end of the lease) first.
SELECT tenant, topic, nullif(consumer_group, '') AS "group", key, state, owner, attempts, begun_at, lease_until,
  settled_at, last_error
FROM idempotency_keys
WHERE (:tenant IS NULL OR tenant = :tenant) AND (:topic IS NULL OR topic = :topic)
  AND (:group IS NULL OR consumer_group = :group) AND (:state IS NULL OR state = :state)
ORDER BY coalesce(lease_until, settled_at) DESC
LIMIT :limit;

-- name: log_forgotten
-- Log the actor and the reason of deleting a key without a lease.
INSERT INTO operator_log (at, verb, actor, reason, tenant, topic, consumer_group, key, state, attempts)
SELECT :now, 'forget', :actor, :reason, tenant, topic, consumer_group, key, state, attempts
FROM idempotency_keys
WHERE (tenant, topic, consumer_group, key) = (:tenant, :topic, :consumer_group, :key)
  AND (state <> 'PENDING' OR lease_until <= :now)
RETURNING id;

-- name: forget
-- Delete a key.
DELETE FROM idempotency_keys WHERE (tenant, topic, consumer_group, key) = (:tenant, :topic, :consumer_group, :key);

-- name: forgotten
-- The operations that deleted a key, in order.
SELECT verb, at, actor, reason, state, attempts
FROM operator_log
WHERE (tenant, topic, consumer_group, key) = (:tenant, :topic, :consumer_group, :key) AND verb = 'forget'
ORDER BY id;
