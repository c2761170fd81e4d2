"""Our errors as Spark passes them on: what its own processes raise comes back as text, the last line of a traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from postroom.chassis.exits import EXIT_OF, Exit, Fatal

_OURS: Final = re.compile(r"^postroom\.errors\.(\w+): (.+)$", re.MULTILINE)


@contextmanager
def own_sentences() -> Iterator[None]:
    """Raise `Fatal` with our error's sentence and exit code where Spark raises one of its own around it."""
    from pyspark.errors import PySparkException  # noqa: PLC0415 - slow to import, and an extra

    try:
        yield
    except PySparkException as error:
        ours = _OURS.findall(str(error))
        if not ours:
            raise
        kind, sentence = ours[-1]
        raise Fatal(EXIT_OF.get(kind, Exit.FAILED), sentence) from error
