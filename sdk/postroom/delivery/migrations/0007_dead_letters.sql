-- What nobody could handle, whole. A letter is here before its message is acknowledged, and stays until an operator has
-- replayed or dropped it; from then on its row says who did that, and why, and its payload is gone. The columns from
-- `published_at` on say where its stream has it, as those of postroom.outbox_events do.
CREATE TABLE postroom.dead_letters (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  context text COLLATE "C" NOT NULL,
  letter_id text COLLATE "C" NOT NULL,  -- of the message and the consumer that buried it: one death, one letter
  subject text COLLATE "C" NOT NULL,  -- the letter's
  died_at timestamptz NOT NULL,
  letter bytea NOT NULL,  -- JSON, without the payload; bytes, for other programs' texts may hold what no text may
  payload bytea,

  act text CHECK (act IN ('replayed', 'dropped')),
  settled_at timestamptz,
  settled_by text,
  why text,

  published_at timestamptz,
  publish_attempts integer NOT NULL DEFAULT 0 CHECK (publish_attempts >= 0),
  publish_error text,
  next_attempt_at timestamptz NOT NULL DEFAULT now(),
  stream text COLLATE "C",
  stream_created_at timestamptz,
  stream_sequence bigint,
  epoch integer NOT NULL DEFAULT 0 CHECK (epoch >= 0),

  UNIQUE (context, letter_id),
  CONSTRAINT a_letter_is_settled_by_somebody CHECK (num_nonnulls(act, settled_at, settled_by, why) IN (0, 4)),
  CONSTRAINT a_letter_holds_its_message_until_it_is_settled CHECK ((payload IS NULL) = (settled_at IS NOT NULL)),
  CONSTRAINT a_place_in_a_stream_is_whole CHECK (
    num_nonnulls(stream, stream_created_at, stream_sequence) = CASE WHEN published_at IS NULL THEN 0 ELSE 3 END
  )
);
CREATE INDEX dead_letters_unpublished ON postroom.dead_letters (id) WHERE published_at IS NULL AND settled_at IS NULL;
CREATE INDEX dead_letters_unsettled ON postroom.dead_letters (context, died_at) WHERE settled_at IS NULL;
CREATE UNIQUE INDEX dead_letters_place ON postroom.dead_letters (stream, stream_sequence, stream_created_at)
  WHERE published_at IS NOT NULL;
