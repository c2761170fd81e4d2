-- name: meshes
-- The id of the mesh of this name; of every mesh where there is none.
SELECT id FROM mesh.mesh WHERE slug = $1 OR $1::text IS NULL ORDER BY id;

-- name: extent
-- The first and the last message of each of these meshes that has any.
SELECT mesh_id, least.history_id AS first, greatest.history_id AS last
FROM unnest($1::integer[]) AS wanted (mesh_id)
CROSS JOIN LATERAL (
  SELECT history_id FROM mesh.message_history AS history
  WHERE history.mesh_id = wanted.mesh_id ORDER BY history_id LIMIT 1
) AS least
CROSS JOIN LATERAL (
  SELECT history_id FROM mesh.message_history AS history
  WHERE history.mesh_id = wanted.mesh_id ORDER BY history_id DESC LIMIT 1
) AS greatest
ORDER BY mesh_id;

-- name: latest
-- How far a stream may read in each of these meshes from where it stands on, about $3 messages in all (null: any number),
-- and the last number that each has given out.
--
-- An accept takes its numbers under the mesh's counter, which it holds until its commit: no number below a visible one can
-- still come. A row that was written in any other way has no such promise, so nothing is read from the first row on that
-- is younger than the oldest transaction in progress. Ages are of 32 bits: a negative one is that of a very old row.
WITH wanted AS (
  SELECT * FROM unnest($1::integer[], $2::bigint[]) AS wanted (mesh_id, after)
), horizon AS (
  SELECT age(pg_snapshot_xmin(pg_current_snapshot())::xid) AS age
)
SELECT wanted.mesh_id, counter.last_history_id,
  (
    SELECT max(history_id) FILTER (WHERE settled) FROM (
      SELECT history_id, bool_and(age NOT BETWEEN 0 AND (SELECT age FROM horizon)) OVER (ORDER BY history_id) AS settled
      FROM (
        SELECT history_id, age(history.xmin) AS age FROM mesh.message_history AS history
        WHERE history.mesh_id = wanted.mesh_id AND history_id > wanted.after
        ORDER BY history_id LIMIT ($3::bigint + (SELECT count(*) FROM wanted) - 1) / (SELECT count(*) FROM wanted)
      ) AS next
    ) AS judged
  ) AS latest
FROM wanted JOIN mesh.history_counter AS counter USING (mesh_id);

-- name: read_history
-- What the history itself says of the messages of a mesh after one number and up to another.
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
