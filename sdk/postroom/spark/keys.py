"""The id of a row's message: from the write's namespace and the row's `id` columns, and nothing else.

So a task that is retried, a speculative one, a job run again and a restarted stream send the same id, and the daemon's
outbox row, or the broker's dedupe row, makes the second send a no-op (docs/contract/spark.md#spark-4).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from postroom.ids import MAX_ID_LENGTH

_TAG_DIGITS: Final = 16  # of the namespace's hash
_READABLE: Final = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_ID_LENGTH - _TAG_DIGITS - 1}}}")


class RowIds:
    """Makes the ids of one namespace: `<hash of the namespace>:<the columns' texts, joined by colons>`.

    Ids that follow the key stay readable, and keep the order of the keys, which the outbox's index likes. Texts that
    have no place in an id, or too much of it, are hashed: `<hash>:~<hash of the texts>`. No two keys share an id,
    since neither a colon nor a tilde stands in a readable text.
    """

    def __init__(self, namespace: str) -> None:
        self._tag = hashlib.sha256(namespace.encode()).hexdigest()[:_TAG_DIGITS] + ":"

    def id_of(self, texts: Sequence[str]) -> str:
        """Return the `client_message_id` of the row whose id columns hold `texts`."""
        joined = ":".join(texts)
        if _READABLE.fullmatch(joined) and joined.count(":") == len(texts) - 1:
            return self._tag + joined
        return f"{self._tag}~{hashlib.sha256(msgspec.json.encode(list(texts))).hexdigest()}"
