-- How a row shows the state of its key, in Postgres and in SQLite: what the steps of a claim (sdk/postroom/claims) are filled
-- with.

-- name: taken
-- Always, and on disk.
TRUE

-- name: ended
-- Whether it is not attempted any more.
known.state = 'COMMITTED'

-- name: begin
-- What an attempt changes in addition to its owner.
state = 'PENDING', begun_at = {now}, settled_at = NULL, lease_until = excluded.lease_until

-- name: settle
-- What its end changes; the owner that settled it stays known.
state = CASE WHEN verdict.done THEN 'COMMITTED' ELSE 'FAILED' END, settled_at = {now},
encoding = verdict.encoding, result = verdict.result

-- name: look
-- Whether it is done, why it is dead, its result.
known.state = 'COMMITTED', NULL, known.encoding, known.result
