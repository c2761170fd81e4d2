-- Which messages need not be published again where a stream lost them.

-- Whether a message was handled: a consumer has it in its inbox as processed or dead, and none has it as waiting.
CREATE FUNCTION postroom.is_confirmed(id text, subject text) RETURNS boolean LANGUAGE sql STABLE
RETURN (
  SELECT coalesce(bool_and(num_nonnulls(inbox.processed_at, inbox.dead_at) > 0), false)
  FROM postroom.inbox_messages AS inbox
  WHERE inbox.source_context
      = split_part(is_confirmed.subject, '.', CASE WHEN starts_with(is_confirmed.subject, 'cmd.') THEN 2 ELSE 1 END)
    AND inbox.message_id = is_confirmed.id
);
