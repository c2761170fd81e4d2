-- name: lock_schema
-- One process at a time looks at the schema and creates it.
SELECT pg_advisory_xact_lock(hashtextextended('postroom_once', 0));

-- name: version
-- The version of the schema, from its table's comment; no row where it is missing. (`to_regclass` would answer from the
-- session's cache, which may be older than the lock.)
SELECT description
FROM pg_description
JOIN pg_class ON pg_class.oid = objoid
JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = 'postroom_once' AND relname = 'idempotency_keys' AND objsubid = 0 AND classoid = 'pg_class'::regclass;

-- name: now
-- The clock that dates keys.
SELECT clock_timestamp();

-- name: purge
-- Delete the keys that ended before a moment, the oldest first; keys that are being settled are left alone.
--   $1 age  $2 limit
WITH old AS (
    SELECT tenant, topic, consumer_group, key
    FROM postroom_once.idempotency_keys
    WHERE coalesce(lease_until, settled_at) < clock_timestamp() - $1::interval
    ORDER BY coalesce(lease_until, settled_at)
    LIMIT $2
    FOR UPDATE SKIP LOCKED
)
DELETE FROM postroom_once.idempotency_keys USING old
WHERE (idempotency_keys.tenant, idempotency_keys.topic, idempotency_keys.consumer_group, idempotency_keys.key)
    = (old.tenant, old.topic, old.consumer_group, old.key)
RETURNING 1;

-- name: find
-- The keys that are wanted, latest end (or end of the lease) first.
--   $1 tenant  $2 topic  $3 group  $4 state, each of which may be null  $5 limit
SELECT tenant, topic, nullif(consumer_group, '') AS "group", key, state, owner, attempts, begun_at, lease_until,
  settled_at, last_error
FROM postroom_once.idempotency_keys
WHERE ($1::text IS NULL OR tenant = $1) AND ($2::text IS NULL OR topic = $2)
  AND ($3::text IS NULL OR consumer_group = $3) AND ($4::text IS NULL OR state = $4)
ORDER BY coalesce(lease_until, settled_at) DESC
LIMIT $5;

-- name: forget
-- Delete a key without a lease, and log the actor, the role, and the reason. A lease that began under a clock that was
-- ahead ends as late from now as it did from its beginning, as for a claim.
--   $1 tenant  $2 topic  $3 group  $4 key  $5 actor  $6 reason
WITH set_back AS (
    UPDATE postroom_once.idempotency_keys
    SET lease_until = lease_until - begun_at + clock_timestamp(), begun_at = clock_timestamp()
    WHERE (tenant, topic, consumer_group, key) = ($1, $2, $3, $4)
      AND state = 'PENDING' AND begun_at > clock_timestamp()
), gone AS (
    DELETE FROM postroom_once.idempotency_keys
    WHERE (tenant, topic, consumer_group, key) = ($1, $2, $3, $4)
      AND (state <> 'PENDING' OR lease_until <= clock_timestamp())
    RETURNING *
)
INSERT INTO postroom_once.operator_log (verb, actor, reason, tenant, topic, consumer_group, key, state, attempts)
SELECT 'forget', $5::text || ' as ' || session_user, $6, tenant, topic, consumer_group, key, state, attempts FROM gone
RETURNING id;

-- name: forgotten
-- The operations that deleted a key, in order.
--   $1 tenant  $2 topic  $3 group  $4 key
SELECT verb, at, actor, reason, state, attempts
FROM postroom_once.operator_log
WHERE (tenant, topic, consumer_group, key) = ($1, $2, $3, $4) AND verb = 'forget'
ORDER BY id;
