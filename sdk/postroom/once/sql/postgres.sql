-- name: lock_schema
-- One process at a time looks at the schema and creates it.
SELECT pg_advisory_xact_lock(hashtextextended('postroom_once', 0));

-- name: version
-- The version of the schema, as its table's comment; no row where there is none. (`to_regclass` would answer from what the
-- session remembers, which may be older than the lock.)
SELECT description
FROM pg_description
JOIN pg_class ON pg_class.oid = objoid
JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = 'postroom_once' AND relname = 'idempotency_keys' AND objsubid = 0 AND classoid = 'pg_class'::regclass;

-- name: take
-- Make a free key PENDING: a new one, a failed one, one whose lease has run out. No row where it is not free.
--   $1 tenant  $2 topic  $3 group  $4 key  $5 owner  $6 lease  $7 the last error of a lease that ran out
INSERT INTO postroom_once.idempotency_keys AS held
    (tenant, topic, consumer_group, key, state, owner, attempts, begun_at, lease_until)
VALUES ($1, $2, $3, $4, 'PENDING', $5, 1, clock_timestamp(), clock_timestamp() + $6::interval)
ON CONFLICT (tenant, topic, consumer_group, key) DO UPDATE
SET state = 'PENDING',
    owner = $5,
    attempts = held.attempts + 1,
    begun_at = clock_timestamp(),
    lease_until = clock_timestamp() + $6::interval,
    settled_at = NULL,
    last_error = CASE held.state WHEN 'PENDING' THEN $7 ELSE held.last_error END
WHERE held.state = 'FAILED' OR (held.state = 'PENDING' AND held.lease_until <= clock_timestamp())
RETURNING state, owner, attempts, lease_until, last_error, encoding, result, clock_timestamp() AS now;

-- name: look
-- One key as it is.
--   $1 tenant  $2 topic  $3 group  $4 key
SELECT state, owner, attempts, lease_until, last_error, encoding, result, clock_timestamp() AS now
FROM postroom_once.idempotency_keys
WHERE (tenant, topic, consumer_group, key) = ($1, $2, $3, $4);

-- name: renew
-- Let a lease that still runs run on.
--   $1 tenant  $2 topic  $3 group  $4 key  $5 owner  $6 lease
UPDATE postroom_once.idempotency_keys
SET lease_until = clock_timestamp() + $6::interval
WHERE (tenant, topic, consumer_group, key) = ($1, $2, $3, $4)
  AND state = 'PENDING' AND owner = $5 AND lease_until > clock_timestamp()
RETURNING lease_until;

-- name: settle
-- End a lease that still runs: COMMITTED with a result, or FAILED with an error.
--   $1 tenant  $2 topic  $3 group  $4 key  $5 owner  $6 state  $7 error  $8 encoding  $9 result
UPDATE postroom_once.idempotency_keys
SET state = $6,
    lease_until = NULL,
    settled_at = clock_timestamp(),
    last_error = coalesce($7, last_error),
    encoding = $8,
    result = $9
WHERE (tenant, topic, consumer_group, key) = ($1, $2, $3, $4)
  AND state = 'PENDING' AND owner = $5 AND lease_until > clock_timestamp()
RETURNING state;

-- name: purge
-- Forget the keys that ended before a moment, the oldest first; keys that somebody settles just now are left alone.
--   $1 age  $2 limit
WITH old AS (
    SELECT tenant, topic, consumer_group, key
    FROM postroom_once.idempotency_keys
    WHERE coalesce(lease_until, settled_at) < clock_timestamp() - $1::interval
    ORDER BY coalesce(lease_until, settled_at)
    LIMIT $2
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM postroom_once.idempotency_keys USING old
    WHERE (idempotency_keys.tenant, idempotency_keys.topic, idempotency_keys.consumer_group, idempotency_keys.key)
        = (old.tenant, old.topic, old.consumer_group, old.key)
    RETURNING 1
)
SELECT count(*) FROM gone;

-- name: find
-- The keys that are wanted, those first that ended last, or whose lease ends last.
--   $1 tenant  $2 topic  $3 group  $4 state, each of which may be null  $5 limit
SELECT tenant, topic, consumer_group, key, state, owner, attempts, begun_at, lease_until, settled_at, last_error
FROM postroom_once.idempotency_keys
WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR topic = $2)
  AND ($3::text IS NULL OR consumer_group = $3) AND ($4::text IS NULL OR state = $4)
ORDER BY coalesce(lease_until, settled_at) DESC
LIMIT $5;

-- name: forget
-- Forget a key that nobody has a lease on, and keep who wanted it, in which role, and why.
--   $1 tenant  $2 topic  $3 group  $4 key  $5 actor  $6 reason
WITH gone AS (
    DELETE FROM postroom_once.idempotency_keys
    WHERE (tenant, topic, consumer_group, key) = ($1, $2, $3, $4)
      AND (state <> 'PENDING' OR lease_until <= clock_timestamp())
    RETURNING *
)
INSERT INTO postroom_once.operator_log (verb, actor, reason, tenant, topic, consumer_group, key, state, attempts)
SELECT 'forget', $5::text || ' as ' || session_user, $6, tenant, topic, consumer_group, key, state, attempts FROM gone
RETURNING id;

-- name: forgotten
-- When operators had a key forgotten, in order.
--   $1 tenant  $2 topic  $3 group  $4 key
SELECT at, actor, reason, state, attempts
FROM postroom_once.operator_log
WHERE (tenant, topic, consumer_group, key) = ($1, $2, $3, $4) AND verb = 'forget'
ORDER BY id;
