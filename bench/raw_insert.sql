INSERT INTO outbox (id, client_message_id, request_fingerprint, payload, enqueued_at, next_attempt_at, lane, priority,
                    destination, submitted_by)
VALUES (:id, :client_message_id, :fingerprint, :payload, :now, :now, 1, 'next', 'topic:orders', '0:0');
