-- The queries to the outbox in an application's own database, in the application's transaction. Every value is a text, since
-- drivers, and applications' own types and codecs, differ in how they pass any other type.

-- name: emit
-- Puts an event into the outbox and returns its id.
SELECT CAST(postroom.emit(
  context => CAST(:mesh AS text),
  aggregate_type => CAST(:aggregate_type AS text),
  aggregate_id => CAST(:aggregate_id AS text),
  event_type => CAST(:event_type AS text),
  payload => CAST(CAST(:payload AS text) AS jsonb),
  event_version => CAST(CAST(:event_version AS text) AS integer),
  correlation_id => CAST(CAST(:correlation_id AS text) AS uuid),
  causation_id => CAST(CAST(:causation_id AS text) AS uuid),
  traceparent => CAST(:traceparent AS text),
  occurred_at => coalesce(CAST(CAST(:occurred_at AS text) AS timestamptz), now()),
  id => CAST(CAST(:id AS text) AS uuid)
) AS text) AS id

-- name: emit_command
-- Puts a command for one worker into the outbox and returns its id.
SELECT CAST(postroom.emit_command(
  context => CAST(:mesh AS text),
  queue => CAST(:queue AS text),
  payload => CAST(CAST(:payload AS text) AS jsonb),
  aggregate_type => coalesce(CAST(:aggregate_type AS text), 'queue'),
  aggregate_id => CAST(:aggregate_id AS text),
  correlation_id => CAST(CAST(:correlation_id AS text) AS uuid),
  causation_id => CAST(CAST(:causation_id AS text) AS uuid),
  traceparent => CAST(:traceparent AS text),
  id => CAST(CAST(:id AS text) AS uuid)
) AS text) AS id

-- name: begin_handling
-- Takes a message in hand, or returns what became of it before.
SELECT state, attempts, last_error, encoding, encode(result, 'hex') AS result
FROM postroom.begin_handling(
  CAST(:tenant AS text), CAST(:topic AS text), CAST(:consumer AS text), CAST(:key AS text)
)

-- name: end_handling
-- Notes that a message is handled, and its result, from the commit of this transaction on.
SELECT postroom.end_handling(
  CAST(:tenant AS text), CAST(:topic AS text), CAST(:consumer AS text), CAST(:key AS text), CAST(:encoding AS text),
  decode(CAST(:result AS text), 'hex')
) AS ended
