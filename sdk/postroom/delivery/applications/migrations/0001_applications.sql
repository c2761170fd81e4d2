-- What the database of an application has beside the tables of delivering: which meshes may be emitted to, what operators
-- did here, and the keys of its handlers in the handlers' own transactions.

-- The meshes that there are: those that the installation named, until a worker brings the list of its broker's database.
-- While it is empty, nobody here can tell, and any name is accepted.
CREATE TABLE postroom.known_meshes (
  slug text COLLATE "C" PRIMARY KEY CHECK (slug ~ '^[a-z][a-z0-9_]*$' AND length(slug) <= 64 AND slug <> 'cmd')
);

-- Raises 23503 (UNKNOWN_MESH), as `postroom.check_mesh` does beside the broker's tables.
CREATE FUNCTION postroom.check_known_mesh() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  context text := postroom.context_of(NEW.subject);
BEGIN
  IF EXISTS (SELECT FROM postroom.known_meshes)
    AND NOT EXISTS (SELECT FROM postroom.known_meshes AS known WHERE known.slug = context)
    AND NOT EXISTS (SELECT FROM postroom.declared_subjects AS declared WHERE NEW.subject ~ declared.pattern)
  THEN
    RAISE EXCEPTION 'UNKNOWN_MESH: there is no mesh %, so % would never be published: correct the name, or create the mesh '
      '(postroom mesh create %)', context, NEW.subject, context
      USING ERRCODE = 'foreign_key_violation', CONSTRAINT = 'UNKNOWN_MESH',
      HINT = 'A mesh is known here as soon as the worker that publishes from this database has seen it at the broker.';
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER mesh_is_known BEFORE INSERT ON postroom.outbox_events
  FOR EACH ROW EXECUTE FUNCTION postroom.check_known_mesh();

-- What operators changed in this database, and why: `mesh.operator_log` is the broker's.
CREATE TABLE postroom.operator_log (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  actor text NOT NULL,  -- a user as `alice as postroom`
  verb text NOT NULL,
  noun text NOT NULL,
  key text NOT NULL,
  outcome text NOT NULL,
  reason text NOT NULL
);

-- A handler's key in the handler's own transaction (docs/contract/delivery.md#delivery-92). It is a key of the registry of
-- what was done once, which operators see and workers forget as any other. But no lease holds it: its row does, which no
-- other transaction can write before this one ends. The lease that the row must have is over from the start, so that a key
-- whose transaction commits without `end_handling` is free for the next attempt.
--
-- Both run with their owner's rights: a service needs no right to the registry's tables.

-- Takes a key in hand, once every other transaction that has it in hand has ended. `state` is 'run' for the one that has to do it
-- now, 'done' with the result where it was done before, 'held' where somebody else holds it by a lease, and 'nested' where this
-- transaction has it in hand already.
CREATE FUNCTION postroom.begin_handling(
  tenant text, topic text, consumer text, key text,
  OUT state text, OUT attempts integer, OUT last_error text, OUT encoding text, OUT result bytea
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
  INSERT INTO postroom_once.idempotency_keys AS known
    (tenant, topic, consumer_group, key, state, owner, attempts, begun_at, lease_until)
  VALUES ($1, $2, $3, $4, 'PENDING', 'transaction ' || pg_current_xact_id(), 1, clock_timestamp(), clock_timestamp())
  ON CONFLICT (tenant, topic, consumer_group, key) DO UPDATE
  SET state = 'PENDING', owner = excluded.owner, attempts = known.attempts + 1, begun_at = excluded.begun_at,
    lease_until = excluded.lease_until, settled_at = NULL
  WHERE known.state = 'FAILED' OR known.state = 'PENDING' AND known.owner <> excluded.owner AND (
    known.lease_until <= clock_timestamp() OR known.begun_at > clock_timestamp() + interval '1 minute'  -- by a clock ahead
  )
  RETURNING 'run', known.attempts, known.last_error INTO begin_handling.state, begin_handling.attempts, begin_handling.last_error;
  IF FOUND THEN
    RETURN;
  END IF;
  SELECT CASE WHEN known.state = 'COMMITTED' THEN 'done' WHEN known.owner = 'transaction ' || pg_current_xact_id() THEN 'nested'
    ELSE 'held' END, known.attempts, known.encoding, known.result
  INTO begin_handling.state, begin_handling.attempts, begin_handling.encoding, begin_handling.result
  FROM postroom_once.idempotency_keys AS known
  WHERE (known.tenant, known.topic, known.consumer_group, known.key) = ($1, $2, $3, $4);
END $$;

-- Notes that it is done, with its result: from the commit of this transaction on. False where another transaction than
-- this one took it in hand.
CREATE FUNCTION postroom.end_handling(
  tenant text, topic text, consumer text, key text, encoding text, result bytea
) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  UPDATE postroom_once.idempotency_keys AS known
  SET state = 'COMMITTED', settled_at = clock_timestamp(), lease_until = NULL, encoding = $5, result = $6
  WHERE (known.tenant, known.topic, known.consumer_group, known.key) = ($1, $2, $3, $4)
    AND known.state = 'PENDING' AND known.owner = 'transaction ' || pg_current_xact_id();
  RETURN FOUND;
END $$;

REVOKE EXECUTE ON FUNCTION postroom.begin_handling(text, text, text, text) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION postroom.end_handling(text, text, text, text, text, bytea) FROM PUBLIC;
