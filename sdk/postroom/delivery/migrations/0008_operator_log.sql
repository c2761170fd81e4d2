-- What operators changed: by whom, as the operating system and Postgres, or the broker's token, say it; what, and why. A row
-- is written in the transaction of its change.
CREATE TABLE postroom.operator_log (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  actor text NOT NULL,  -- as `alice as postroom`
  verb text NOT NULL,
  subject text NOT NULL,
  reason text  -- where the verb asks for it
);
CREATE FUNCTION postroom.refuse_change_of_log() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'the operator log takes additions only' USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER operator_log_is_append_only BEFORE UPDATE OR DELETE ON postroom.operator_log
  FOR EACH ROW EXECUTE FUNCTION postroom.refuse_change_of_log();
