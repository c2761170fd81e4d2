-- The steps of a claim in Postgres. What is in braces is the table's own (`Table`, and its parts: `taken`, `ended`, `begin`,
-- `settle`, `look`). They take parallel arrays, a key in each position, whose columns come last; positions of a result count from 1.
-- An owner's lease that ran out settles and prolongs nothing.

-- name: claim
-- Records new keys and begins an attempt at each key that is waiting or whose lease ran out; returns those. An attempt whose
-- lease ran out leaves $3 behind. A claim that is repeated, because its answer was lost, has the same owner and counts once.
-- Sorted, so that two workers lock common rows in one order.
--   $1 owner  $2 lease  $3 last error  $4… columns
INSERT INTO {table} AS known ({columns}, owner, attempts, {begun_at}, {lease_until})
SELECT {columns}, $1::{owner}, 1, clock_timestamp(), clock_timestamp() + $2::interval
FROM unnest({row_arrays}) AS fresh ({columns})
WHERE {taken}
ORDER BY {key}
ON CONFLICT ({key}) DO UPDATE SET
  attempts = known.attempts + CASE WHEN known.owner = excluded.owner THEN 0 ELSE 1 END,
  last_error = CASE
    WHEN known.{lease_until} IS NOT NULL AND known.owner <> excluded.owner THEN $3 ELSE known.last_error
  END,
  owner = excluded.owner,
  {begin}
WHERE NOT ({ended})
  AND (known.{lease_until} IS NULL OR known.owner = excluded.owner OR known.{lease_until} <= clock_timestamp())
RETURNING {known_key}, attempts, last_error, {lease_until};

-- name: set_back
-- The clock was set back behind the beginning of these attempts, so that their leases would end late, perhaps by years: each
-- ends as late from now as it did from its beginning, which is after its holder has let go, if that lives.
--   $1… key
UPDATE {table} AS known SET
  {lease_until} = known.{lease_until} - known.{begun_at} + clock_timestamp(),
  {begun_at} = clock_timestamp()
FROM unnest({key_arrays}) AS wanted ({key})
WHERE ({known_key}) = ({wanted_key}) AND known.{lease_until} IS NOT NULL AND known.{begun_at} > clock_timestamp();

-- name: look_up
-- The rows of keys, whatever their owner.
--   $1… key
SELECT {known_key}, {look}, known.owner, known.attempts, known.{lease_until}, known.last_error, clock_timestamp()
FROM unnest({key_arrays}) AS wanted ({key})
JOIN {table} AS known USING ({key});

-- name: renew
-- Prolongs leases; returns the position and the end of each. None began later than now.
--   $1 lease  $2 owners  $3… key
UPDATE {table} AS known SET
  {lease_until} = clock_timestamp() + $1::interval,
  {begun_at} = least(known.{begun_at}, clock_timestamp())
FROM unnest($2::{owner}[], {renewed_arrays}) WITH ORDINALITY AS held (owner, {key}, position)
WHERE ({known_key}) = ({held_key}) AND known.owner = held.owner AND known.{lease_until} > clock_timestamp()
RETURNING held.position, known.{lease_until};

-- name: settle
-- Ends attempts: done, dead where there is a reason, else waiting again; returns the position of each. One that does not
-- count is taken back.
--   $1 owners  $2 done  $3 reasons  $4 errors  $5 counts  $6 encodings  $7 results  $8… key
UPDATE {table} AS known SET
  attempts = known.attempts - CASE WHEN verdict.counts THEN 0 ELSE 1 END,
  last_error = coalesce(verdict.error, known.last_error),
  {lease_until} = NULL,
  {settle}
FROM unnest($1::{owner}[], $2::boolean[], $3::text[], $4::text[], $5::boolean[], $6::text[], $7::bytea[], {settled_arrays})
  WITH ORDINALITY AS verdict (owner, done, reason, error, counts, encoding, result, {key}, position)
WHERE ({known_key}) = ({verdict_key}) AND known.owner = verdict.owner AND known.{lease_until} > clock_timestamp()
RETURNING verdict.position;
