-- The reports of programs (docs/contract/operate.md#operate-60), and the counts of each minute that follow (#operate-71).

-- name: keep_report
-- The report $8, made at $7, of the program $1 (kind), $2 (mesh), $3 (name), $4 (host), $5 (pid) at the address $6. It takes
-- the place of an earlier process, at the same address or silent for $9; of one name, the latest 100 are kept. It may be
-- lost, since another follows: it does not wait for the disk.
WITH alike AS MATERIALIZED (
  SELECT host, pid, address, reported_at, row_number() OVER (ORDER BY reported_at DESC) AS place
  FROM postroom.programs WHERE kind = $1 AND mesh = $2 AND name = $3 AND (host, pid) <> ($4, $5)
), superseded AS (
  DELETE FROM postroom.programs AS old USING alike
  WHERE (old.kind, old.mesh, old.name, old.host, old.pid) = ($1, $2, $3, alike.host, alike.pid)
    AND (alike.place >= 100 OR alike.host = $4 AND (alike.address = $6 OR postroom.is_silent(alike.reported_at, $9::interval)))
), lazily AS MATERIALIZED (
  SELECT set_config('synchronous_commit', 'off', true)
)
INSERT INTO postroom.programs (kind, mesh, name, host, pid, address, clock_seconds, report)
SELECT $1, $2, $3, $4, $5, $6, extract(epoch FROM $7::timestamptz - clock_timestamp()), $8::json FROM lazily
ON CONFLICT (kind, mesh, name, host, pid) DO UPDATE SET address = excluded.address, reported_at = excluded.reported_at,
  clock_seconds = excluded.clock_seconds, report = excluded.report;

-- name: withdraw_report
-- Forgets the program $1 (kind), $2 (name), $3 (host), $4 (pid), which stops.
DELETE FROM postroom.programs WHERE (kind, mesh, name, host, pid) = ($1, '', $2, $3, $4);

-- name: forget_daemons
-- Forgets the daemons of the mesh $1, and there of the member $2, or of all.
DELETE FROM postroom.programs WHERE kind = 'daemon' AND mesh = $1 AND ($2::text IS NULL OR name = $2);

-- name: list_programs
-- The programs of the mesh $1, or all, with whether they have been silent for $2.
SELECT kind, nullif(mesh, '') AS mesh, name, host, pid, address, reported_at,
  postroom.is_silent(reported_at, $2::interval) AS away, clock_seconds, report
FROM postroom.programs WHERE $1::text IS NULL OR mesh = $1
ORDER BY kind, mesh, name, host, pid LIMIT $3;

-- name: sweep_programs
-- Forgets up to $1 programs that have been silent for $2.
DELETE FROM postroom.programs WHERE (kind, mesh, name, host, pid) IN (
  SELECT kind, mesh, name, host, pid FROM postroom.programs WHERE postroom.is_silent(reported_at, $2::interval) LIMIT $1
);

-- name: count_minute
-- Adds the counts $2 of the names $1 to the current minute, without waiting for the disk.
WITH lazily AS MATERIALIZED (
  SELECT set_config('synchronous_commit', 'off', true)
)
INSERT INTO postroom.minute_counts (minute, name, count)
SELECT date_trunc('minute', now()), grown.name, grown.count
FROM lazily, unnest($1::text[], $2::bigint[]) AS grown (name, count) ORDER BY grown.name
ON CONFLICT (minute, name) DO UPDATE SET count = minute_counts.count + excluded.count;

-- name: list_minutes
-- The last $1 minutes, each with its counts by name.
SELECT minute AS at, coalesce(json_object_agg(name, count) FILTER (WHERE name IS NOT NULL), '{}') AS counts
FROM generate_series(date_trunc('minute', now()) - ($1 - 1) * interval '1 minute', now(), '1 minute') AS minute
LEFT JOIN postroom.minute_counts USING (minute) GROUP BY minute ORDER BY minute;

-- name: sweep_minutes
-- Forgets up to $1 counts of minutes that are over for $2.
DELETE FROM postroom.minute_counts WHERE (minute, name) IN (
  SELECT minute, name FROM postroom.minute_counts WHERE minute < now() - $2::interval LIMIT $1
);
