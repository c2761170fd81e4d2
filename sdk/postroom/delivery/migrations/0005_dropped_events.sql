-- What operators took out of the outbox because it could never be published: whole, with who did it, and why.
CREATE TABLE postroom.dropped_events (
  id uuid PRIMARY KEY,
  aggregate_type text NOT NULL,
  aggregate_id text COLLATE "C" NOT NULL,
  event_type text NOT NULL,
  event_version integer NOT NULL,
  subject text COLLATE "C" NOT NULL,
  payload jsonb NOT NULL,
  occurred_at timestamptz NOT NULL,
  correlation_id uuid,
  causation_id uuid,
  publish_attempts integer NOT NULL,
  publish_error text,
  dropped_at timestamptz NOT NULL DEFAULT now(),
  dropped_by text NOT NULL,
  reason text NOT NULL CHECK (reason <> '')
);
