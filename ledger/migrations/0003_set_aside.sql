-- Messages that a worker took without having their activity (an older deployment, a name that changed): acknowledged, and
-- kept for a worker that has it. Of leg 2, with what the message says, and as which event it came: which of them answer,
-- the activity knows, that is, a worker that has it.
CREATE TABLE ledger.set_aside (
  activity_id uuid NOT NULL REFERENCES ledger.activity ON DELETE CASCADE,
  guid text COLLATE "C" NOT NULL CHECK (guid ~ '^[!-~]+$' AND length(guid) <= 255),
  at timestamptz NOT NULL DEFAULT now(),
  worker text NOT NULL,
  leg integer NOT NULL CHECK (leg IN (1, 2)),
  answer jsonb,
  request_id uuid,
  event text COLLATE "C",

  PRIMARY KEY (activity_id, guid),
  CONSTRAINT leg_2_has_an_answer CHECK (leg = 2 OR num_nonnulls(answer, request_id, event) = 0)
);
CREATE INDEX set_aside_request ON ledger.set_aside (request_id) WHERE request_id IS NOT NULL;
