-- name: find_accepted
-- B0: the dedupe rows that already hold some of these ids.
SELECT client_message_id, sender_id, broker_message_id, history_id, request_fingerprint, first_seen_at,
  history_available
FROM mesh.client_message_dedupe
WHERE mesh_id = $1 AND client_message_id = ANY ($2::text[]);

-- name: accepts_under_way
-- Of these transactions (null: of all) those that write dedupe rows and have not ended, as an array: an accept holds the
-- table's lock from its first step to its commit.
SELECT array_agg(DISTINCT virtualtransaction) FROM pg_locks
WHERE locktype = 'relation' AND relation = 'mesh.client_message_dedupe'::regclass AND mode = 'RowExclusiveLock'
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND ($1::text[] IS NULL OR virtualtransaction = ANY ($1));

-- name: accept
-- B2 and B3 of a whole batch in one statement, which is one transaction: it commits all of its rows or none.
--
-- Locks are taken in one order, so that no two batches and no administration wait for each other in a circle:
-- the mesh and the sender, the destinations, the ids in order. The numbers come before them, as `take_history_ids` has it:
-- everything else reads what that answered. A part of a batch whose numbers are taken already is given the one before its
-- first as $25.
-- Answers a row per message: its history_id if it was accepted, why its destination refused it, or neither where another
-- batch, or a message before it, took its id first. No row at all: the sender's token was revoked meanwhile.
WITH taken AS MATERIALIZED (
  SELECT coalesce($25::bigint, mesh.take_history_ids($1, cardinality($6::uuid[]))) AS before
), sender AS MATERIALIZED (
  SELECT member.id AS sender_id, mesh.id AS mesh_id
  FROM mesh.mesh JOIN mesh.member ON member.mesh_id = mesh.id
  WHERE mesh.id = (SELECT $1 FROM taken WHERE before IS NOT NULL) AND member.id = $2
    AND $3 IN (member.token_sha256, member.old_token_sha256)
  FOR KEY SHARE OF mesh FOR SHARE OF member
), input AS MATERIALIZED (
  SELECT batch.*, sender.*
  FROM sender, unnest(
    $6::uuid[], $7::text[], $8::bytea[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[],
    $14::text[], $15::bytea[], $16::boolean[], $17::text[], $18::integer[], $19::uuid[], $20::uuid[], $24::text[]
  ) WITH ORDINALITY AS batch (
    broker_message_id, client_message_id, request_fingerprint, destination_kind, destination_ref, priority, reply_to,
    traceparent, meta, body, body_is_text, event, event_version, correlation_id, causation_id, subject,
    position
  )
), topic AS MATERIALIZED (
  SELECT topic.id, topic.name FROM mesh.topic
  WHERE mesh_id = $1
    AND name = ANY (ARRAY(SELECT destination_ref FROM input WHERE destination_kind = 'topic'))
  FOR SHARE
), subscription AS MATERIALIZED (
  SELECT held.topic_id FROM topic JOIN mesh.topic_subscription AS held ON held.topic_id = topic.id
  WHERE held.member_id = $2
  FOR SHARE OF held
), recipient AS MATERIALIZED (
  SELECT member.id, member.name FROM mesh.member
  WHERE mesh_id = $1 AND revoked_at IS NULL
    AND name = ANY (ARRAY(SELECT destination_ref FROM input WHERE destination_kind = 'dm'))
  FOR SHARE
), queue AS MATERIALIZED (
  SELECT queue.id, queue.name FROM mesh.queue
  WHERE mesh_id = $1
    AND name = ANY (ARRAY(SELECT destination_ref FROM input WHERE destination_kind = 'queue'))
  FOR SHARE
), destination AS MATERIALIZED (
  SELECT 'topic' AS destination_kind, topic.name AS destination_ref, topic.id AS destination_id,
    CASE WHEN subscription.topic_id IS NULL THEN 'not_subscribed' END AS refusal,
    ARRAY(
      SELECT reader.member_id FROM mesh.topic_subscription AS reader
      JOIN mesh.member ON member.id = reader.member_id AND member.revoked_at IS NULL
      WHERE reader.topic_id = topic.id
    ) AS recipients
  FROM topic LEFT JOIN subscription ON subscription.topic_id = topic.id
  UNION ALL SELECT 'dm', name, id, NULL, ARRAY[id] FROM recipient
  UNION ALL SELECT 'queue', name, id, NULL, '{}' FROM queue
), judged AS MATERIALIZED (
  SELECT input.*, destination.destination_id, destination.recipients,
    CASE
      WHEN destination.destination_id IS NOT NULL THEN destination.refusal
      WHEN input.destination_kind = 'dm' THEN 'member_not_found'
      ELSE input.destination_kind || '_not_found'
    END AS refusal
  FROM input LEFT JOIN destination USING (destination_kind, destination_ref)
), numbered AS MATERIALIZED (
  SELECT judged.*, taken.before + judged.position AS history_id FROM judged, taken WHERE refusal IS NULL
), claimed AS (
  INSERT INTO mesh.client_message_dedupe (
    mesh_id, client_message_id, sender_id, broker_message_id, history_id, request_fingerprint,
    destination_kind, destination_ref, expires_at
  )
  SELECT mesh_id, client_message_id, sender_id, broker_message_id, history_id, request_fingerprint,
    destination_kind, destination_ref, now() + $5::interval
  FROM numbered ORDER BY client_message_id, position
  ON CONFLICT DO NOTHING
  RETURNING broker_message_id
), accepted AS MATERIALIZED (
  SELECT numbered.* FROM numbered JOIN claimed USING (broker_message_id)
), written_to_topics AS (
  INSERT INTO mesh.topic_message (
    broker_message_id, mesh_id, history_id, client_message_id, sender_id, topic_id,
    priority, reply_to, traceparent, meta, body, body_is_text
  )
  SELECT broker_message_id, mesh_id, history_id, client_message_id, sender_id, destination_id,
    priority, reply_to, traceparent, meta::jsonb, body, body_is_text
  FROM accepted WHERE destination_kind = 'topic'
), written_to_receivers AS (
  INSERT INTO mesh.message_queue (
    broker_message_id, mesh_id, history_id, client_message_id, sender_id, recipient_id, queue_id,
    priority, reply_to, traceparent, meta, body, body_is_text
  )
  SELECT broker_message_id, mesh_id, history_id, client_message_id, sender_id,
    CASE destination_kind WHEN 'dm' THEN destination_id END, CASE destination_kind WHEN 'queue' THEN destination_id END,
    priority, reply_to, traceparent, meta::jsonb, body, body_is_text
  FROM accepted WHERE destination_kind <> 'topic'
), remembered AS (
  INSERT INTO mesh.message_history (
    mesh_id, history_id, broker_message_id, client_message_id, sender_id,
    destination_kind, destination_id, destination_ref, recipients, expires_at
  )
  SELECT mesh_id, history_id, broker_message_id, client_message_id, sender_id,
    destination_kind, destination_id, destination_ref, cardinality(recipients), now() + $4::interval
  FROM accepted
), to_deliver AS (
  INSERT INTO mesh.delivery_queue (broker_message_id, recipient_id, mesh_id, history_id)
  SELECT broker_message_id, recipient_id, mesh_id, history_id FROM accepted, unnest(recipients) AS recipient_id
  ORDER BY history_id
), mentioned AS (
  INSERT INTO mesh.mention_index (broker_message_id, mentioned, mesh_id, history_id)
  SELECT accepted.broker_message_id, mention.member, accepted.mesh_id, accepted.history_id
  FROM unnest($21::bigint[], $22::text[]) AS mention (position, member) JOIN accepted USING (position)
), announced AS (
  INSERT INTO postroom.outbox_events (
    id, aggregate_type, aggregate_id, event_type, event_version, payload, correlation_id, causation_id,
    subject, traceparent
  )
  SELECT broker_message_id, destination_kind, $23 || '/' || destination_kind || ':' || destination_ref,
    destination_ref, event_version, event::jsonb, correlation_id, causation_id,
    subject, traceparent
  FROM accepted WHERE subject IS NOT NULL ORDER BY history_id
)
SELECT judged.position - 1 AS position, accepted.history_id, judged.refusal
FROM judged LEFT JOIN accepted USING (position);

-- name: accept_alone
-- Waits until no other transaction accepts for mesh $1, and lets none do so before this one ends: statements that take ids
-- one after the other would otherwise wait for another's in a circle. Postgres ends a broker that stands still meanwhile.
SELECT pg_advisory_xact_lock(hashtext('postroom.history'), $1),
  set_config('idle_in_transaction_session_timeout', '10s', true);

-- name: take_history_ids
-- The number before the first of $2 numbers for messages of mesh $1; null where the mesh was deleted.
SELECT mesh.take_history_ids($1, $2);

-- name: ring
-- Wakes the publishers of the sources $1. A notification costs a commit; this one need not be on disk.
SELECT set_config('synchronous_commit', 'off', true), pg_notify('postroom_outbox', source) FROM unnest($1::text[]) AS source;

-- name: find_members_by_token
-- Which members these tokens speak for; a revoked one has none.
SELECT member.mesh_id, mesh.slug AS mesh, member.id AS member_id, member.name,
  CASE member.role WHEN 'admin' THEN 'administer' ELSE member.role END AS role, asked.token_sha256
FROM unnest($1::bytea[]) AS asked (token_sha256)
JOIN mesh.member ON asked.token_sha256 = member.token_sha256 OR asked.token_sha256 = member.old_token_sha256
JOIN mesh.mesh ON mesh.id = member.mesh_id;

-- name: find_operators_by_token
-- Which operators these tokens speak for; a revoked one has none.
SELECT operator.token_sha256, operator.name, operator.role, operator.mesh_id, mesh.slug AS mesh
FROM mesh.operator LEFT JOIN mesh.mesh ON mesh.id = operator.mesh_id
WHERE operator.token_sha256 = ANY ($1::bytea[]);

-- name: create_operator
-- An operator of a mesh, or of all, with the digest of its token; no row where the name is, or ever was, taken.
INSERT INTO mesh.operator (name, role, mesh_id, token_sha256) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING RETURNING id;

-- name: list_operators
-- Every operator that there is or was.
SELECT operator.name, operator.role, mesh.slug AS mesh, operator.created_at, operator.revoked_at
FROM mesh.operator LEFT JOIN mesh.mesh ON mesh.id = operator.mesh_id ORDER BY operator.name;

-- name: revoke_operator
-- Takes an operator's token away permanently.
UPDATE mesh.operator SET revoked_at = now(), token_sha256 = NULL WHERE name = $1 AND revoked_at IS NULL RETURNING id;

-- name: rotate_operator_token
-- Replaces an operator's token; the old one is worth nothing from now on.
UPDATE mesh.operator SET token_sha256 = $2 WHERE name = $1 AND revoked_at IS NULL
RETURNING role, (SELECT slug FROM mesh.mesh WHERE mesh.id = mesh_id) AS mesh;

-- name: create_mesh
-- A mesh; no row where the slug is taken.
INSERT INTO mesh.mesh (slug) VALUES ($1) ON CONFLICT DO NOTHING RETURNING slug, created_at;

-- name: list_meshes
-- Every mesh.
SELECT slug, created_at FROM mesh.mesh ORDER BY slug;

-- name: lock_mesh
-- The mesh, held against accepts that are on their way into it.
SELECT id FROM mesh.mesh WHERE slug = $1 FOR UPDATE;

-- name: mesh_holds
-- What the mesh $1 (by its name, $2) still has, which a new mesh of that name would have: messages or ids that are still
-- recognised, jobs; and whether a replay, or an event that a program emitted, waits to be published.
SELECT
  EXISTS (SELECT FROM mesh.client_message_dedupe WHERE mesh_id = $1) AS messages,
  EXISTS (SELECT FROM ledger.job WHERE context = $2) AS jobs,
  EXISTS (SELECT FROM postroom.replays WHERE context = $2 AND published_at IS NULL) AS replays,
  EXISTS (SELECT FROM postroom.outbox_events WHERE published_at IS NULL AND postroom.context_of(subject) = $2) AS events;

-- name: delete_mesh
-- An empty mesh, with its members, topics and queues; and what was emitted or replayed in it, which a new mesh of its name
-- would get.
WITH
  deleted AS (DELETE FROM mesh.mesh WHERE id = $1 RETURNING slug),
  emitted AS (DELETE FROM postroom.outbox_events WHERE postroom.context_of(subject) IN (SELECT slug FROM deleted))
DELETE FROM postroom.replays WHERE context IN (SELECT slug FROM deleted);

-- name: find_mesh
-- The id of a mesh.
SELECT id FROM mesh.mesh WHERE slug = $1;

-- name: hold_mesh
-- The id of a mesh, which is not deleted before this transaction ends.
SELECT id FROM mesh.mesh WHERE slug = $1 FOR KEY SHARE;

-- name: create_member
-- A member with the digest of its token; no row where the name is, or ever was, taken.
INSERT INTO mesh.member (mesh_id, name, role, token_sha256) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING RETURNING id;

-- name: list_members
-- Every member that a mesh has or had.
SELECT name, role, created_at, revoked_at FROM mesh.member WHERE mesh_id = $1 ORDER BY name;

-- name: revoke_member
-- Takes a member's token away permanently.
UPDATE mesh.member SET revoked_at = now(), token_sha256 = NULL, old_token_sha256 = NULL
WHERE mesh_id = $1 AND name = $2 AND revoked_at IS NULL RETURNING id;

-- name: rotate_token
-- Replaces a member's token; the old ones are worth nothing from now on.
UPDATE mesh.member SET token_sha256 = $3, old_token_sha256 = NULL
WHERE mesh_id = $1 AND name = $2 AND revoked_at IS NULL RETURNING role;

-- name: add_token
-- Gives a member a token beside the one that it has; no row where it has two already.
UPDATE mesh.member SET token_sha256 = $3, old_token_sha256 = token_sha256
WHERE mesh_id = $1 AND name = $2 AND revoked_at IS NULL AND old_token_sha256 IS NULL RETURNING role;

-- name: retire_token
-- The old one of a member's two tokens is worth nothing from now on; no row where it has but one.
UPDATE mesh.member SET old_token_sha256 = NULL
WHERE mesh_id = $1 AND name = $2 AND old_token_sha256 IS NOT NULL RETURNING id;

-- name: has_member
-- Whether a mesh has a member, one that is not revoked.
SELECT EXISTS (SELECT FROM mesh.member WHERE mesh_id = $1 AND name = $2 AND revoked_at IS NULL);

-- name: create_topic
-- A topic; no row where the name is taken.
INSERT INTO mesh.topic (mesh_id, name) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING name, created_at, 0 AS subscribers;

-- name: list_topics
-- The topics of a mesh and how many members each reaches.
SELECT topic.name, topic.created_at, count(member.id) AS subscribers
FROM mesh.topic
LEFT JOIN mesh.topic_subscription AS held ON held.topic_id = topic.id
LEFT JOIN mesh.member ON member.id = held.member_id AND member.revoked_at IS NULL
WHERE topic.mesh_id = $1 GROUP BY topic.id ORDER BY topic.name;

-- name: delete_topic
-- A topic with its subscriptions; its messages stay in the history.
DELETE FROM mesh.topic WHERE mesh_id = $1 AND name = $2 RETURNING id;

-- name: find_topic
-- The id of a topic.
SELECT id FROM mesh.topic WHERE mesh_id = $1 AND name = $2;

-- name: hold_topic
-- The id of a topic, which is not deleted before this transaction ends.
SELECT id FROM mesh.topic WHERE mesh_id = $1 AND name = $2 FOR KEY SHARE;

-- name: hold_member
-- The id of a member that is not revoked, which is not deleted before this transaction ends.
SELECT id FROM mesh.member WHERE mesh_id = $1 AND name = $2 AND revoked_at IS NULL FOR KEY SHARE;

-- name: subscribe
-- A subscription, and whether it is new.
WITH created AS (
  INSERT INTO mesh.topic_subscription (topic_id, member_id) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING created_at
)
SELECT created_at, true AS created FROM created
UNION ALL
SELECT created_at, false FROM mesh.topic_subscription WHERE topic_id = $1 AND member_id = $2;

-- name: list_subscriptions
-- Who is subscribed to a topic.
SELECT member.name, held.created_at
FROM mesh.topic_subscription AS held JOIN mesh.member ON member.id = held.member_id AND member.revoked_at IS NULL
WHERE held.topic_id = $1 ORDER BY member.name;

-- name: unsubscribe
-- Ends a subscription.
DELETE FROM mesh.topic_subscription WHERE topic_id = $1 AND member_id = $2 RETURNING member_id;

-- name: lock_topic
-- The topic, held against every other change of what it has. The next statement sees what the last holder left.
SELECT id FROM mesh.topic WHERE id = $1 FOR NO KEY UPDATE;

-- name: create_webhook
-- A webhook of a topic that is held; no row where it has $4 of them.
INSERT INTO mesh.webhook (topic_id, url, secret)
SELECT $1, $2, $3 WHERE (SELECT count(*) FROM mesh.webhook WHERE topic_id = $1) < $4
RETURNING id, created_at;

-- name: list_webhooks
-- The webhooks of a topic, without their secrets.
SELECT id, url, created_at FROM mesh.webhook WHERE topic_id = $1 ORDER BY created_at, id;

-- name: delete_webhook
-- A webhook of a topic; workers notice that it was deleted.
DELETE FROM mesh.webhook WHERE topic_id = $1 AND id = $2 RETURNING id;

-- name: create_queue
-- A queue; no row where the name is taken.
INSERT INTO mesh.queue (mesh_id, name) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING name, created_at;

-- name: list_queues
-- The queues of a mesh.
SELECT name, created_at FROM mesh.queue WHERE mesh_id = $1 ORDER BY name;

-- name: delete_queue
-- A queue; its messages stay in the history.
DELETE FROM mesh.queue WHERE mesh_id = $1 AND name = $2 RETURNING id;

-- name: current_incarnation
-- The incarnation of the database, which begins where that lies elsewhere than before.
SELECT mesh.current_incarnation();

-- name: last_history_id
-- The last number that a mesh has given out.
SELECT mesh.last_history_id($1);

-- name: history_horizon
-- Up to which number the history of a mesh may be read by the next statement, and the oldest transaction, with all later
-- ones, of which it may not.
SELECT last_history_id, oldest FROM mesh.history_horizon(ARRAY[$1::integer]);

-- name: begin_incarnation
-- A new incarnation, for the reason $1.
SELECT mesh.begin_incarnation($1);

-- name: find_cursor
-- The incarnation, the id of a mesh, and, where the cursor $2 lies among numbers that were skipped or not given out yet, the
-- last one before.
SELECT incarnation.id AS incarnation, mesh.id AS mesh_id,
  coalesce((
    SELECT gap.last_before FROM mesh.history_gap AS gap
    WHERE gap.mesh_id = mesh.id AND gap.last_before < $2 AND $2 < gap.history_floor
  ), (
    SELECT last FROM coalesce(mesh.last_history_id(mesh.id), 0) AS last WHERE $2 > last
  )) AS last_before
FROM (SELECT id FROM mesh.incarnation ORDER BY history_floor DESC LIMIT 1) AS incarnation
LEFT JOIN mesh.mesh ON mesh.slug = $1;

-- name: read_history
-- A page of a mesh's history after a history_id: at most $3 rows are looked at, and of those the caller may see at most
-- $4 are returned. $5 is the member that reads, null for one who may read everything; $6 and $7 are a destination, or
-- null; $8 and $9 are the horizon, beyond which a lower number may still come. Each row says how far the page looked,
-- whether there is more behind, and up to which number retention has deleted messages of the mesh; there is one row without a
-- message where the page is empty. Ages are of 32 bits: a negative one is that of a very old row.
WITH looked_at AS MATERIALIZED (
  SELECT history_id, sender_id, destination_kind, destination_id, destination_ref
  FROM mesh.message_history
  WHERE mesh_id = $1 AND history_id > $2 AND history_id <= $8
    AND age(xmin) NOT BETWEEN 0 AND coalesce(age($9::xid), -1)
  ORDER BY history_id LIMIT $3
), visible AS MATERIALIZED (
  SELECT history_id FROM looked_at
  WHERE ($6::text IS NULL OR (destination_kind = $6 AND destination_ref = $7))
    AND (
      $5::integer IS NULL OR sender_id = $5 OR (destination_kind = 'dm' AND destination_id = $5)
      OR (destination_kind = 'topic'
        AND destination_id IN (SELECT topic_id FROM mesh.topic_subscription WHERE member_id = $5))
    )
  ORDER BY history_id LIMIT $4
), extent AS (
  SELECT (SELECT max(history_id) FROM looked_at) AS looked_to,
    (SELECT count(*) FROM visible) AS matched,
    EXISTS (
      SELECT FROM mesh.message_history
      WHERE mesh_id = $1 AND history_id > (SELECT coalesce(max(history_id), $2) FROM looked_at)
    ) AS more,
    (SELECT max(last_history_id) FROM mesh.history_deletion WHERE mesh_id = $1) AS deleted_to
), page AS (
  SELECT message.* FROM mesh.message JOIN visible USING (history_id) WHERE mesh_id = $1
)
SELECT extent.*, page.* FROM extent LEFT JOIN page ON true ORDER BY page.history_id;

-- name: find_latest
-- The latest messages of the mesh $1 that came before the place ($2, $3) and not before $4: at most $5 rows are looked at,
-- and of those that match at most $6 are returned. $7 is the member that reads, null for one who may read everything; $8 is
-- a sender, $9 and $10 are a destination, or null. Each row says how many were looked at, and the place of the last one;
-- there is one row without a message where none matches.
WITH looked_at AS MATERIALIZED (
  SELECT accepted_at, history_id, broker_message_id, client_message_id, sender_id,
    destination_kind, destination_id, destination_ref
  FROM mesh.message_history
  WHERE mesh_id = $1 AND (accepted_at, history_id) < ($2::timestamptz, $3::bigint) AND accepted_at >= $4
  ORDER BY accepted_at DESC, history_id DESC LIMIT $5
), extent AS (
  SELECT count(*) AS looked_at, (array_agg(accepted_at ORDER BY accepted_at, history_id))[1] AS last_at,
    (array_agg(history_id ORDER BY accepted_at, history_id))[1] AS last_id
  FROM looked_at
), page AS (
  SELECT looked_at.*, member.name AS sender FROM looked_at JOIN mesh.member ON member.id = sender_id
  WHERE ($8::text IS NULL OR member.name = $8)
    AND ($9::text IS NULL OR (destination_kind = $9 AND destination_ref = $10))
    AND (
      $7::integer IS NULL OR sender_id = $7 OR (destination_kind = 'dm' AND destination_id = $7)
      OR (destination_kind = 'topic'
        AND destination_id IN (SELECT topic_id FROM mesh.topic_subscription WHERE member_id = $7))
    )
  ORDER BY accepted_at DESC, history_id DESC LIMIT $6
)
SELECT extent.looked_at, last_at, last_id, broker_message_id::text, client_message_id, sender, accepted_at, history_id,
  destination_kind || ':' || destination_ref AS "to"
FROM extent LEFT JOIN page ON true ORDER BY accepted_at DESC, history_id DESC;

-- name: read_message
-- One message that the caller may see: $2 is its mesh and $3 the member that reads; null may read everything.
SELECT message.* FROM mesh.message
JOIN (
  SELECT mesh_id, history_id FROM mesh.topic_message WHERE broker_message_id = $1
  UNION ALL SELECT mesh_id, history_id FROM mesh.message_queue WHERE broker_message_id = $1
) AS found USING (mesh_id, history_id)
WHERE ($2::integer IS NULL OR mesh_id = $2)
  AND (
    $3::integer IS NULL OR sender_id = $3 OR (destination_kind = 'dm' AND destination_id = $3)
    OR (destination_kind = 'topic'
      AND destination_id IN (SELECT topic_id FROM mesh.topic_subscription WHERE member_id = $3))
  );

-- name: lead_sweeping
-- Whether this connection sweeps: one does, of all brokers; the lock goes with the connection.
SELECT pg_try_advisory_lock(hashtext('postroom.broker.sweep'));

-- name: sweep_messages
-- Deletes up to $1 messages past their time, with all that hangs on them; their dedupe rows become tombstones.
WITH expired AS MATERIALIZED (
  DELETE FROM mesh.message_history WHERE (mesh_id, history_id) IN (
    SELECT mesh_id, history_id FROM mesh.message_history
    WHERE expires_at <= now() ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
  )
  RETURNING mesh_id, broker_message_id, client_message_id
), topic_messages AS (
  DELETE FROM mesh.topic_message USING expired WHERE topic_message.broker_message_id = expired.broker_message_id
), queued_messages AS (
  DELETE FROM mesh.message_queue USING expired WHERE message_queue.broker_message_id = expired.broker_message_id
), deliveries AS (
  DELETE FROM mesh.delivery_queue USING expired WHERE delivery_queue.broker_message_id = expired.broker_message_id
), mentions AS (
  DELETE FROM mesh.mention_index USING expired WHERE mention_index.broker_message_id = expired.broker_message_id
), tombstones AS (
  UPDATE mesh.client_message_dedupe AS dedupe SET history_available = false FROM expired
  WHERE dedupe.mesh_id = expired.mesh_id AND dedupe.client_message_id = expired.client_message_id
)
SELECT count(*) FROM expired;

-- name: sweep_ids
-- Deletes up to $1 tombstones past their time: those ids are recognised no longer. Their time is the one that they were
-- accepted with, or $2 where that is longer by now (null: for ever), since that is what daemons are promised.
DELETE FROM mesh.client_message_dedupe WHERE (mesh_id, client_message_id) IN (
  SELECT mesh_id, client_message_id FROM mesh.client_message_dedupe
  WHERE expires_at <= now() AND first_seen_at <= now() - $2::interval AND NOT history_available
  ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
);

-- name: log_operations
-- Keep that $1 did $2 to each $3 with a key of $4, what came of it ($5), and why ($6).
INSERT INTO mesh.operator_log (actor, verb, noun, key, outcome, reason)
SELECT $1, $2, $3, key, $5, $6 FROM unnest($4::text[]) AS key;

-- name: list_operations
-- The latest $7 lines before the number $6, of things $1, by the verb $2, by who is $3, to the key $4, from $5 on; each of
-- these but the time may be null. With a mesh $8 only lines of the nouns $9, whose keys begin with their mesh.
SELECT id, at, actor, verb, noun, key, outcome, reason FROM mesh.operator_log
WHERE ($1::text IS NULL OR noun = $1) AND ($2::text IS NULL OR verb = $2) AND ($3::text IS NULL OR actor = $3)
  AND ($4::text IS NULL OR key = $4) AND at >= $5 AND ($6::bigint IS NULL OR id < $6)
  AND ($8::text IS NULL OR noun = ANY ($9::text[]) AND split_part(key, ' ', 1) = $8)
ORDER BY id DESC LIMIT $7;

-- name: find_key
-- What is known of the key of `postroom.once` $4 of the tenant $1, the topic $2 and the group $3.
SELECT state, owner, attempts, lease_until, last_error, encoding, result FROM postroom_once.idempotency_keys
WHERE (tenant, topic, consumer_group, key) = ($1, $2, $3, $4);

-- name: is_read_only
-- Whether Postgres takes no writes: it is a standby, or configured so.
SELECT current_setting('transaction_read_only')::boolean;
