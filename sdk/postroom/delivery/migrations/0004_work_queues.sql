-- How far work queues are known to be done with, so that what is taken out of one by hand can be told from what was
-- acknowledged: a work queue forgets both alike.

-- Of the messages of one stream (by its creation: a stream made anew has floors of its own) whose subject matches, all up
-- to the floor were acknowledged. A consumer's floor stays when the consumer goes.
CREATE TABLE postroom.work_queue_floors (
  stream text COLLATE "C" NOT NULL,
  stream_created_at timestamptz NOT NULL,
  filter text COLLATE "C" NOT NULL,  -- as NATS writes it
  pattern text COLLATE "C" NOT NULL,  -- as a regular expression
  floor bigint NOT NULL,
  seen_at timestamptz NOT NULL DEFAULT now(),

  PRIMARY KEY (stream, stream_created_at, filter),
  CONSTRAINT a_floor_is_a_number_of_the_stream CHECK (floor >= 0)
);

-- Which numbers of a stream were acknowledged though others before them were not: they were gone, and nothing was purged.
CREATE TABLE postroom.work_queue_holes (
  stream text COLLATE "C" NOT NULL,
  stream_created_at timestamptz NOT NULL,
  numbers int8multirange NOT NULL,

  PRIMARY KEY (stream, stream_created_at)
);

-- Whether a message of a work queue was acknowledged when that was last looked at.
CREATE FUNCTION postroom.is_settled(stream text, stream_created_at timestamptz, sequence bigint, subject text)
RETURNS boolean LANGUAGE sql STABLE
RETURN EXISTS (
  SELECT FROM postroom.work_queue_floors AS known
  WHERE known.stream = is_settled.stream AND known.stream_created_at = is_settled.stream_created_at
    AND known.floor >= is_settled.sequence AND is_settled.subject ~ known.pattern
) OR EXISTS (
  SELECT FROM postroom.work_queue_holes AS known
  WHERE known.stream = is_settled.stream AND known.stream_created_at = is_settled.stream_created_at
    AND known.numbers @> is_settled.sequence
);
