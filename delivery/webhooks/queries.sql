-- The webhooks, out of the broker's tables: the one place in delivering that knows them.

-- name: list_webhooks
-- Every webhook, with what is needed to deliver to it.
SELECT webhook.id::text, mesh.slug AS mesh, topic.name AS topic, webhook.url, webhook.secret, webhook.created_at
FROM mesh.webhook
JOIN mesh.topic ON topic.id = webhook.topic_id
JOIN mesh.mesh ON mesh.id = topic.mesh_id;

-- name: list_meshes
-- Every mesh.
SELECT slug FROM mesh.mesh;

-- name: forget_removed
-- Deletes up to $1 rows of webhooks that are gone: what was not finished nobody will, and no id is given a second time.
DELETE FROM postroom.inbox_messages WHERE ctid IN (
  SELECT inbox.ctid FROM postroom.inbox_messages AS inbox
  WHERE inbox.consumer ~ '^webhook__[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
    AND NOT EXISTS (SELECT FROM mesh.webhook WHERE webhook.id::text = substr(inbox.consumer, 10))
  LIMIT $1 FOR UPDATE SKIP LOCKED
);
