-- name: extent
-- The first and the last message of the mesh of that name, or (null) of each; nulls where it has none. After a restore the
-- numbers go on far above: a row for each stretch of them.
SELECT mesh.id AS mesh_id, least.history_id AS first, greatest.history_id AS last
FROM mesh.mesh
JOIN mesh.history_stretch AS stretch ON stretch.mesh_id = mesh.id
LEFT JOIN LATERAL (
  SELECT history_id FROM mesh.message_history AS history
  WHERE history.mesh_id = mesh.id AND history_id > stretch.after AND history_id <= stretch.up_to
  ORDER BY history_id LIMIT 1
) AS least ON true
LEFT JOIN LATERAL (
  SELECT history_id FROM mesh.message_history AS history
  WHERE history.mesh_id = mesh.id AND history_id > stretch.after AND history_id <= stretch.up_to
  ORDER BY history_id DESC LIMIT 1
) AS greatest ON true
WHERE slug = $1 OR $1::text IS NULL
ORDER BY mesh.id, stretch.after;

-- name: extent_within
-- The same, of the messages that were accepted from $2 up to $3 (null: no bound). OFFSET keeps Postgres from scanning the
-- numbers instead, past everything that was accepted before.
SELECT mesh.id AS mesh_id, within.first, within.last
FROM mesh.mesh
JOIN mesh.history_stretch AS stretch ON stretch.mesh_id = mesh.id
CROSS JOIN LATERAL (
  SELECT min(history_id) AS first, max(history_id) AS last FROM (
    SELECT history_id FROM mesh.message_history AS history
    WHERE history.mesh_id = mesh.id AND history_id > stretch.after AND history_id <= stretch.up_to
      AND accepted_at >= coalesce($2::timestamptz, '-infinity') AND accepted_at <= coalesce($3::timestamptz, 'infinity')
    OFFSET 0
  ) AS accepted
) AS within
WHERE slug = $1 OR $1::text IS NULL
ORDER BY mesh.id, stretch.after;

-- name: database
-- Which database it is, by its first incarnation, which a copy keeps; the last deletion of messages so far, or 0.
SELECT (SELECT id::text FROM mesh.incarnation ORDER BY history_floor LIMIT 1) AS database,
  (SELECT coalesce(max(id), 0) FROM mesh.history_deletion) AS deletion;

-- name: beginning
-- Where a stream of what was accepted since $2 begins in each selected mesh: at the message before the first of those; where
-- there is none yet, at the last one before which no number can still come (see `latest`).
SELECT mesh.id AS mesh_id, coalesce(
  CASE WHEN within.first IS NULL THEN (
    SELECT history_id FROM mesh.message_history AS history
    WHERE history.mesh_id = mesh.id
      AND age(history.xmin) NOT BETWEEN 0 AND (SELECT age(pg_snapshot_xmin(pg_current_snapshot())::xid))
    ORDER BY history_id DESC LIMIT 1
  ) ELSE (
    SELECT history_id FROM mesh.message_history AS history
    WHERE history.mesh_id = mesh.id AND history_id < within.first ORDER BY history_id DESC LIMIT 1
  ) END, 0) AS history_id
FROM mesh.mesh
CROSS JOIN LATERAL (
  SELECT min(history_id) AS first FROM (
    SELECT history_id FROM mesh.message_history AS history
    WHERE history.mesh_id = mesh.id AND accepted_at >= $2::timestamptz
    OFFSET 0
  ) AS accepted
) AS within
WHERE slug = $1 OR $1::text IS NULL;

-- name: newest
-- The last message of each selected mesh, 0 where it has none.
SELECT mesh.id AS mesh_id, coalesce((
  SELECT history_id FROM mesh.message_history AS history
  WHERE history.mesh_id = mesh.id ORDER BY history_id DESC LIMIT 1
), 0) AS history_id
FROM mesh.mesh WHERE slug = $1 OR $1::text IS NULL ORDER BY mesh.id;

-- name: latest
-- How far a stream may read in each selected mesh, after the numbers that it has read in some of them ($2, $3), about $4
-- messages in all (null: any number); the last number that each has given out; the last message that was deleted before
-- the stream came to it, by a deletion later than $5; where the stream is at a number that a restore has taken back, the
-- last one before those; and which database it is.
--
-- The transaction with the lower id takes the lower numbers: nothing is read from the first row on that is younger than the
-- oldest transaction in progress, which may still write a lower one. Where none is in progress, there is no such row, and
-- nothing to search. Ages have 32 bits: a negative one is that of a very old row.
WITH wanted AS (
  SELECT mesh.id AS mesh_id, mesh.slug AS mesh, coalesce(stand.after, 0) AS after
  FROM mesh.mesh LEFT JOIN unnest($2::integer[], $3::bigint[]) AS stand (mesh_id, after) ON stand.mesh_id = mesh.id
  WHERE slug = $1 OR $1::text IS NULL
), horizon AS (
  SELECT age(pg_snapshot_xmin(snapshot)::xid) AS age, pg_snapshot_xmin(snapshot) = pg_snapshot_xmax(snapshot) AS quiet
  FROM pg_current_snapshot() AS snapshot
)
SELECT wanted.mesh_id, wanted.mesh, wanted.after,
  mesh.last_history_id(wanted.mesh_id),
  CASE WHEN $4::bigint IS NULL AND (SELECT quiet FROM horizon) THEN (
    SELECT history_id FROM mesh.message_history AS history
    WHERE history.mesh_id = wanted.mesh_id AND history_id > wanted.after ORDER BY history_id DESC LIMIT 1
  ) ELSE (
    SELECT max(history_id) FILTER (WHERE settled) FROM (
      SELECT history_id, bool_and(age NOT BETWEEN 0 AND (SELECT age FROM horizon)) OVER (ORDER BY history_id) AS settled
      FROM (
        SELECT history_id, age(history.xmin) AS age FROM mesh.message_history AS history
        WHERE history.mesh_id = wanted.mesh_id AND history_id > wanted.after
        ORDER BY history_id LIMIT ($4::bigint + (SELECT count(*) FROM wanted) - 1) / (SELECT count(*) FROM wanted)
      ) AS next
    ) AS judged
  ) END AS latest,
  (
    SELECT max(deletion.last_history_id) FROM mesh.history_deletion AS deletion
    WHERE deletion.mesh_id = wanted.mesh_id AND deletion.id > $5 AND deletion.last_history_id > wanted.after
  ) AS lost,
  (
    SELECT gap.last_before FROM mesh.history_gap AS gap
    WHERE gap.mesh_id = wanted.mesh_id AND gap.last_before < wanted.after AND wanted.after < gap.history_floor
  ) AS restored,
  (SELECT id::text FROM mesh.incarnation ORDER BY history_floor LIMIT 1) AS database
FROM wanted
ORDER BY wanted.mesh_id;

-- name: next
-- The first message of each of these meshes after a number, in each stretch of them (see `extent`), where that ends;
-- whether some were deleted after it, and which database it is, as in `latest`.
SELECT wanted.mesh_id, mesh.slug AS mesh, wanted.after,
  (
    SELECT history_id FROM mesh.message_history AS history
    WHERE history.mesh_id = wanted.mesh_id AND history_id > greatest(wanted.after, stretch.after)
      AND history_id <= stretch.up_to
    ORDER BY history_id LIMIT 1
  ) AS first,
  stretch.up_to,
  (
    SELECT max(deletion.last_history_id) FROM mesh.history_deletion AS deletion
    WHERE deletion.mesh_id = wanted.mesh_id AND deletion.id > $3 AND deletion.last_history_id > wanted.after
  ) AS lost,
  (SELECT id::text FROM mesh.incarnation ORDER BY history_floor LIMIT 1) AS database
FROM unnest($1::integer[], $2::bigint[]) AS wanted (mesh_id, after)
JOIN mesh.mesh ON mesh.id = wanted.mesh_id
JOIN mesh.history_stretch AS stretch ON stretch.mesh_id = wanted.mesh_id AND stretch.up_to > wanted.after
ORDER BY wanted.mesh_id, stretch.after;

-- name: read_history
-- The messages of a mesh after one number and up to another, with the columns of the history only.
SELECT history_id, broker_message_id, client_message_id, mesh.slug AS mesh, sender.name AS sender,
  destination_kind || ':' || destination_ref AS "to", destination_kind, accepted_at
FROM mesh.message_history AS history
JOIN mesh.mesh ON mesh.id = history.mesh_id
JOIN mesh.member AS sender ON sender.id = history.sender_id
WHERE history.mesh_id = $1 AND history_id > $2 AND history_id <= $3
  AND accepted_at >= coalesce($4::timestamptz, '-infinity') AND accepted_at <= coalesce($5::timestamptz, 'infinity')
  AND ($6::text IS NULL OR sender.name = $6)
  AND ($7::text IS NULL OR destination_kind || ':' || destination_ref = $7)
  AND ($8::text IS NULL OR destination_kind = $8)
  AND ($9::text IS NULL OR client_message_id = $9)
  AND ($10::uuid IS NULL OR broker_message_id = $10);

-- name: read_messages
-- The same messages, whole.
SELECT history_id, broker_message_id, client_message_id, mesh, sender,
  destination_kind || ':' || destination_ref AS "to", destination_kind, accepted_at,
  encode(request_fingerprint, 'hex') AS request_fingerprint, priority,
  CASE WHEN body_is_text THEN convert_from(body, 'UTF8') END AS body,
  CASE WHEN NOT body_is_text THEN translate(encode(body, 'base64'), E'\n', '') END AS body_base64,
  meta, reply_to, traceparent
FROM mesh.message
WHERE mesh_id = $1 AND history_id > $2 AND history_id <= $3
  AND accepted_at >= coalesce($4::timestamptz, '-infinity') AND accepted_at <= coalesce($5::timestamptz, 'infinity')
  AND ($6::text IS NULL OR sender = $6)
  AND ($7::text IS NULL OR destination_kind || ':' || destination_ref = $7)
  AND ($8::text IS NULL OR destination_kind = $8)
  AND ($9::text IS NULL OR client_message_id = $9)
  AND ($10::uuid IS NULL OR broker_message_id = $10);

-- name: columns
-- Some columns of a query, so that Postgres need not compute the others.
SELECT {columns} FROM ({query}) AS whole;
