-- Which messages need not be published again where a stream lost them.

-- Whether a message was handled: a consumer has it in its inbox as processed or dead, and none has it as waiting. A
-- webhook waits like any other, but what it has handled says nothing of those that the message is really for.
CREATE FUNCTION postroom.is_confirmed(id text, subject text) RETURNS boolean LANGUAGE sql STABLE
RETURN (
  SELECT coalesce(
    bool_and(num_nonnulls(inbox.processed_at, inbox.dead_at) > 0)
      AND bool_or(NOT starts_with(inbox.consumer, 'webhook__')),
    false
  )
  FROM postroom.inbox_messages AS inbox
  WHERE inbox.source_context
      = split_part(is_confirmed.subject, '.', CASE WHEN starts_with(is_confirmed.subject, 'cmd.') THEN 2 ELSE 1 END)
    AND inbox.message_id = is_confirmed.id
);
