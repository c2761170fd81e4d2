-- What operators took out of the deliveries because it could never be published, and why; the message itself stays in the
-- history.
CREATE TABLE postroom.dropped_deliveries (
  broker_message_id uuid NOT NULL,
  recipient_id integer NOT NULL,
  recipient text NOT NULL,
  subject text COLLATE "C" NOT NULL,
  enqueued_at timestamptz NOT NULL,
  publish_attempts integer NOT NULL,
  publish_error text,
  dropped_at timestamptz NOT NULL DEFAULT now(),
  dropped_by text NOT NULL,
  reason text NOT NULL CHECK (reason <> ''),

  PRIMARY KEY (broker_message_id, recipient_id)
);
