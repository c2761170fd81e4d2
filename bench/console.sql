-- What keeps the windows of the console's benchmark alike.

-- name: empty
-- Delete every message and all that follows from it; what is done between two windows is not measured.
TRUNCATE mesh.message_history, mesh.client_message_dedupe, mesh.topic_message, mesh.message_queue, mesh.delivery_queue,
  postroom.outbox_events CASCADE;

-- name: checkpoint
-- Write out what a window has changed, so that no later one has to.
CHECKPOINT;
