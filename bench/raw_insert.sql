INSERT INTO outbox (id, client_message_id, request_fingerprint, payload, enqueued_at, next_attempt_at, status)
VALUES (:id, :client_message_id, :fingerprint, :payload, :now, :now, 'pending');
