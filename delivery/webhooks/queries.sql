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

-- name: forget_unfinished
-- What a consumer that is gone has not finished: nobody will.
DELETE FROM postroom.inbox_messages WHERE consumer = $1 AND processed_at IS NULL AND dead_at IS NULL;
