-- How a row shows the state of its message: what the steps of a claim (sdk/postroom/claims) are filled with.

-- name: taken
-- Always; its commit waits for no disk, so that a Postgres that crashes may forget it (docs/contract/delivery.md#delivery-77).
set_config('synchronous_commit', 'off', true) IS NOT NULL

-- name: ended
-- Whether it is not attempted any more.
known.processed_at IS NOT NULL OR known.dead_at IS NOT NULL

-- name: begin
-- What an attempt changes in addition to its owner.
begun_at = {now}, leased_until = excluded.leased_until

-- name: settle
-- What its end changes.
processed_at = CASE WHEN verdict.done THEN greatest({now}, known.received_at) END,
dead_at = CASE WHEN verdict.reason IS NOT NULL THEN {now} END,
dead_reason = verdict.reason,
owner = NULL

-- name: look
-- Whether it is processed, why it is dead; it has no result.
known.processed_at IS NOT NULL, known.dead_reason, NULL, NULL
