-- What pipelines derive from the history for others to look at. Nothing here is consulted by Postroom itself, and all of
-- it can be dropped and rebuilt.

CREATE SCHEMA pipeline;

-- How many messages each member had accepted in each window of the limiter (docs/contract/accept.md#accept-32).
-- Retention deletes from the history, so a window's count only grows.
CREATE TABLE pipeline.rate_limit_counter (
  mesh text COLLATE "C" NOT NULL,
  member text COLLATE "C" NOT NULL,
  window_start timestamptz NOT NULL,
  window_seconds integer NOT NULL CHECK (window_seconds > 0),
  messages bigint NOT NULL CHECK (messages > 0),
  PRIMARY KEY (mesh, member, window_seconds, window_start),
  CONSTRAINT windows_begin_at_multiples_of_their_length CHECK (extract(epoch FROM window_start) % window_seconds = 0)
);
CREATE INDEX rate_limit_counter_by_time ON pipeline.rate_limit_counter (window_start);

-- The words of every message whose body is text, for `words @@ websearch_to_tsquery('simple', …)`.
CREATE TABLE pipeline.search_index (
  mesh text COLLATE "C" NOT NULL,
  history_id bigint NOT NULL,
  broker_message_id uuid NOT NULL,
  sender text COLLATE "C" NOT NULL,
  destination text COLLATE "C" NOT NULL,
  accepted_at timestamptz NOT NULL,
  words tsvector NOT NULL,
  PRIMARY KEY (mesh, history_id)
);
CREATE INDEX search_index_words ON pipeline.search_index USING gin (words);
