-- The inbox of each consumer (docs/contract/delivery.md#delivery-31): what it received, how often its handler was
-- called, and what came of it.
--
-- A message is known by the context that it comes from and its id, to each consumer for itself: two that share a
-- database both want it handled. A row is in one of four states:
--
--     waiting     neither processed nor dead, without a lease: the next delivery is the next attempt
--     leased      one attempt is being made, by the owner, until `leased_until`; then somebody else may begin another
--     processed   handled: never handled again
--     dead        will not be handled; `dead_reason` and `last_error` say why
--
-- The owner is a fresh token of each claim, so that an attempt whose lease ran out settles nothing.

CREATE TABLE postroom.inbox_messages (
  consumer text COLLATE "C" NOT NULL CHECK (consumer ~ '^[A-Za-z0-9_-]+$' AND length(consumer) <= 64),
  source_context text COLLATE "C" NOT NULL CHECK (
    source_context ~ '^[a-z][a-z0-9_]*$' AND length(source_context) <= 64
  ),
  message_id text COLLATE "C" NOT NULL CHECK (message_id ~ '^[!-~]+$' AND length(message_id) <= 255),
  subject text COLLATE "C" NOT NULL,
  received_at timestamptz NOT NULL DEFAULT now(),
  processed_at timestamptz,
  attempts integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
  last_error text,
  dead_at timestamptz,
  dead_reason text,
  owner uuid,
  leased_until timestamptz,

  PRIMARY KEY (source_context, message_id, consumer),
  CONSTRAINT processed_after_it_was_received CHECK (processed_at >= received_at),
  CONSTRAINT a_dead_message_has_a_reason CHECK ((dead_at IS NULL) = (dead_reason IS NULL)),
  CONSTRAINT a_lease_has_an_owner_and_an_end CHECK ((owner IS NULL) = (leased_until IS NULL)),
  CONSTRAINT a_message_is_in_one_state CHECK (num_nonnulls(processed_at, dead_at, owner) <= 1)
) WITH (fillfactor = 80);
CREATE INDEX idx_inbox_unprocessed ON postroom.inbox_messages (received_at) WHERE processed_at IS NULL;
-- Rows lie about in the order of their receipt: what has to go is found by a coarse index, which costs nothing.
CREATE INDEX inbox_messages_received ON postroom.inbox_messages USING brin (received_at) WITH (autosummarize = on);

-- What is processed or dead stays as it is.
CREATE FUNCTION postroom.refuse_change_of_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'the message % is processed or dead and stays as it is', OLD.message_id
    USING ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER ended_stays BEFORE UPDATE ON postroom.inbox_messages
  FOR EACH ROW WHEN (OLD.processed_at IS NOT NULL OR OLD.dead_at IS NOT NULL)
  EXECUTE FUNCTION postroom.refuse_change_of_ended();
