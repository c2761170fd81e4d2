-- name: has_broker
-- Whether a broker's tables are in this database.
SELECT to_regclass('mesh.mesh') IS NOT NULL;

-- name: role_exists
-- Whether there is the role $1.
SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1);

-- name: foreign_schema
-- Whether there is a schema `postroom` with tables, but without the one of migrations: it is not ours.
SELECT EXISTS (SELECT FROM pg_class WHERE relnamespace = to_regnamespace('postroom') AND relkind = 'r')
  AND to_regclass('postroom.schema_migration') IS NULL;

-- name: write_grants
-- The statements that let the role $1 emit, and keep the keys of its handlers: all that an application may do.
SELECT format(
  'GRANT USAGE ON SCHEMA postroom TO %1$I; '
  'GRANT INSERT (id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, correlation_id, '
  'causation_id, subject, traceparent) ON postroom.outbox_events TO %1$I; '
  'GRANT EXECUTE ON FUNCTION postroom.begin_handling(text, text, text, text), '
  'postroom.end_handling(text, text, text, text, text, bytea) TO %1$I', $1::text
);

-- name: add_meshes
-- Adds the meshes $1 to those that may be emitted to.
INSERT INTO postroom.known_meshes (slug) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING;

-- name: know_meshes
-- Allows emitting to the meshes $1 and to no others.
WITH gone AS (
  DELETE FROM postroom.known_meshes WHERE slug <> ALL ($1::text[])
)
INSERT INTO postroom.known_meshes (slug) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING;

-- name: is_unknown
-- Whether the mesh $1 is none of those that may be emitted to; while there is no list of these, any may.
SELECT EXISTS (SELECT FROM postroom.known_meshes) AND NOT EXISTS (SELECT FROM postroom.known_meshes WHERE slug = $1);

-- name: log_operation
-- Keep that $1 did $2 to the $3 with the key $4, what came of it ($5), and why ($6).
INSERT INTO postroom.operator_log (actor, verb, noun, key, outcome, reason) VALUES ($1, $2, $3, $4, $5, $6);

-- name: list_operations
-- The latest $7 lines before the number $6, of the noun $1, the verb $2, the actor $3, the key $4, from $5 on; each of these
-- but the time may be null.
SELECT id, at, actor, verb, noun, key, outcome, reason FROM postroom.operator_log
WHERE ($1::text IS NULL OR noun = $1) AND ($2::text IS NULL OR verb = $2) AND ($3::text IS NULL OR actor = $3)
  AND ($4::text IS NULL OR key = $4) AND at >= $5 AND ($6::bigint IS NULL OR id < $6)
ORDER BY id DESC LIMIT $7;
