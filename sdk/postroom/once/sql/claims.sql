-- How a key shows where it stands, in Postgres and in SQLite: what the steps of a claim (sdk/postroom/claims) are filled with.

-- name: taken
-- Always, and on disk.
TRUE

-- name: ended
-- Whether nobody attempts it any more.
known.state = 'COMMITTED'

-- name: begin
-- What an attempt changes beside its owner.
state = 'PENDING', begun_at = {now}, settled_at = NULL, lease_until = excluded.lease_until

-- name: settle
-- What its end changes; who settled it stays known.
state = CASE WHEN verdict.done THEN 'COMMITTED' ELSE 'FAILED' END, settled_at = {now},
encoding = verdict.encoding, result = verdict.result

-- name: look
-- Whether it is done, why it is dead, its result.
known.state = 'COMMITTED', NULL, known.encoding, known.result
