-- The idempotency registry in Postgres, version 1. It has a schema of its own, so that it fits into any database.
--
-- `consumer_group` is '' for the scope of the producer.

CREATE SCHEMA IF NOT EXISTS postroom_once;

CREATE TABLE postroom_once.idempotency_keys (
    tenant         text        NOT NULL CHECK (length(tenant) <= 255),
    topic          text        NOT NULL CHECK (length(topic) <= 255),
    consumer_group text        NOT NULL CHECK (length(consumer_group) <= 255),
    key            text        NOT NULL CHECK (length(key) BETWEEN 1 AND 512),
    state          text        NOT NULL,
    owner          text        NOT NULL CHECK (owner <> ''),       -- who holds it, or settled it: the fence
    attempts       integer     NOT NULL CHECK (attempts >= 1),
    begun_at       timestamptz NOT NULL,
    lease_until    timestamptz,
    settled_at     timestamptz,
    last_error     text CHECK (length(last_error) <= 2000),
    encoding       text CHECK (encoding IN ('json', 'bytes')),     -- of the result
    result         bytea CHECK (length(result) <= 1048576),
    PRIMARY KEY (tenant, topic, consumer_group, key),

    -- What each state has, and has not. A state that is none of the three fails too.
    CONSTRAINT state CHECK (
        CASE state
        WHEN 'PENDING'   THEN lease_until IS NOT NULL AND num_nonnulls(settled_at, encoding, result) = 0
        WHEN 'COMMITTED' THEN lease_until IS NULL AND num_nulls(settled_at, encoding, result) = 0
        WHEN 'FAILED'    THEN lease_until IS NULL AND num_nulls(settled_at, last_error) = 0
                              AND num_nonnulls(encoding, result) = 0
        ELSE false END
    )
);

CREATE INDEX idempotency_keys_ended ON postroom_once.idempotency_keys (coalesce(lease_until, settled_at));

-- What operators did to keys. A key that is forgotten leaves nothing else.
CREATE TABLE postroom_once.operator_log (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    verb           text        NOT NULL CHECK (verb IN ('forget')),
    actor          text        NOT NULL,
    reason         text        NOT NULL,
    tenant         text        NOT NULL,
    topic          text        NOT NULL,
    consumer_group text        NOT NULL,
    key            text        NOT NULL,
    state          text        NOT NULL, -- that the key had
    attempts       integer     NOT NULL
);

CREATE INDEX operator_log_key ON postroom_once.operator_log (tenant, topic, consumer_group, key);

CREATE FUNCTION postroom_once.check_transition() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.state <> 'PENDING' THEN
            RAISE EXCEPTION 'no such transition' USING ERRCODE = 'check_violation';
        END IF;
        RETURN NEW;
    END IF;
    IF OLD.state || ' ' || NEW.state
            NOT IN ('PENDING PENDING', 'PENDING COMMITTED', 'PENDING FAILED', 'FAILED PENDING')
        OR (NEW.state <> 'PENDING' AND NEW.owner <> OLD.owner)                                      -- only its owner settles
        OR (NEW.state = 'PENDING' AND NEW.owner <> OLD.owner AND NEW.attempts <> OLD.attempts + 1)  -- taken over: counted
    THEN
        RAISE EXCEPTION 'no such transition' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER check_transition BEFORE INSERT OR UPDATE ON postroom_once.idempotency_keys
FOR EACH ROW EXECUTE FUNCTION postroom_once.check_transition();

COMMENT ON TABLE postroom_once.idempotency_keys IS 'version 1';
