-- The steps of a claim in SQLite, one key at a time in a transaction of the caller. What is in braces is the table's own
-- (`Table`, and its parts: `ended`, `begin`, `settle`, `look`). Times are ms since the epoch.

-- name: claim
-- Records a new key and begins an attempt at one that is waiting or whose lease ran out. An attempt whose lease ran out
-- leaves :expired behind. A claim that is repeated has the same owner and counts once. No row where it is not free.
INSERT INTO {table} AS known ({columns}, owner, attempts, {begun_at}, {lease_until})
VALUES ({row}, :owner, 1, :now, :until)
ON CONFLICT ({key}) DO UPDATE SET
  attempts = known.attempts + CASE WHEN known.owner = excluded.owner THEN 0 ELSE 1 END,
  last_error = CASE
    WHEN known.{lease_until} IS NOT NULL AND known.owner <> excluded.owner THEN :expired ELSE known.last_error
  END,
  owner = excluded.owner,
  {begin}
WHERE NOT ({ended})
  AND (known.{lease_until} IS NULL OR known.owner = excluded.owner OR known.{lease_until} <= :now)
RETURNING attempts, last_error, {lease_until};

-- name: set_back
-- The clock was set back behind the beginning of this attempt, so that its lease would end late, perhaps by years: it ends
-- as late from now as it did from its beginning, which is after its holder has let go, if that lives.
UPDATE {table} SET {lease_until} = {lease_until} - {begun_at} + :now, {begun_at} = :now
WHERE ({key}) = ({key_values}) AND {lease_until} IS NOT NULL AND {begun_at} > :now;

-- name: look_up
-- The row of a key, whatever its owner.
SELECT {look}, known.owner, known.attempts, known.{lease_until}, known.last_error
FROM {table} AS known WHERE ({known_key}) = ({key_values});

-- name: renew
-- Prolongs a lease; no row where it ran out. It never began later than now.
UPDATE {table} SET {lease_until} = :until, {begun_at} = min({begun_at}, :now)
WHERE ({key}) = ({key_values}) AND owner = :owner AND {lease_until} > :now
RETURNING {lease_until};

-- name: settle
-- Ends an attempt: done, dead where there is a reason, else waiting again; no row where its lease ran out.
UPDATE {table} AS known SET
  attempts = known.attempts - CASE WHEN verdict.counts THEN 0 ELSE 1 END,
  last_error = coalesce(verdict.error, known.last_error),
  {lease_until} = NULL,
  {settle}
FROM (
  SELECT :done AS done, :reason AS reason, :error AS error, :counts AS counts, :encoding AS encoding, :result AS result
) AS verdict
WHERE ({known_key}) = ({key_values}) AND known.owner = :owner AND known.{lease_until} > :now
RETURNING 1;
