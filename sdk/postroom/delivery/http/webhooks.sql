-- The webhooks, from the broker's tables; no other file of the room reads them.

-- name: list_webhooks
-- Every webhook, with what is needed to deliver to it.
SELECT webhook.id::text, mesh.slug AS mesh, topic.name AS topic, webhook.url, webhook.secret, webhook.created_at
FROM mesh.webhook
JOIN mesh.topic ON topic.id = webhook.topic_id
JOIN mesh.mesh ON mesh.id = topic.mesh_id;

-- name: set_back
-- The clock was set back: a webhook that it had dated ahead gets what is accepted from now on.
UPDATE mesh.webhook SET created_at = clock_timestamp() WHERE created_at > clock_timestamp();

-- name: is_there
-- Whether the webhook $1 is registered.
SELECT EXISTS (SELECT FROM mesh.webhook WHERE id = $1::uuid);

-- name: list_meshes
-- Every mesh.
SELECT slug FROM mesh.mesh;

-- name: count_blocks
-- How many blocks the inbox has.
SELECT pg_relation_size('postroom.inbox_messages') / current_setting('block_size')::integer;

-- name: forget_removed
-- Deletes the rows of deleted webhooks from $1 up to $2: what was not finished never will be, and no id is given a second
-- time. Only the whole inbox shows which these are; a statement reads a stretch of it.
DELETE FROM postroom.inbox_messages AS inbox
WHERE inbox.ctid >= $1::tid AND inbox.ctid < $2::tid
  AND inbox.consumer ~ '^webhook__[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
  AND NOT EXISTS (SELECT FROM mesh.webhook WHERE webhook.id::text = substr(inbox.consumer, 10));
