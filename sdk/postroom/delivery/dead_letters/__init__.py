"""Dead letters: what could not be handled, kept whole, with the reason (docs/contract/delivery.md#delivery-44).

A letter is a row of a record before its message is acknowledged: in Postgres what consumers, webhooks and jobs buried,
in its event store what an agent did. From there it is published, and published again where its stream lost it, as
events are. A daemon has no record of its own: what it cannot read is in the stream alone.
"""

from postroom.delivery.dead_letters.letter import DeadLetter, DeadLetters, RecordedLetters, is_dead_letter, letter_of
from postroom.delivery.dead_letters.stream import StreamLetters

__all__ = ["DeadLetter", "DeadLetters", "RecordedLetters", "StreamLetters", "is_dead_letter", "letter_of"]
