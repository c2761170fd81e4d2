"""`search-index`: the words of every message whose body is text, in `pipeline.search_index` of the same database.

A second run adds what is missing, and deletes the words of messages that retention has deleted: what may not be kept as
a message may not be kept as an index either.
"""

import asyncio
from typing import Final

from pyspark.sql import SparkSession

from pipeline.runner import History, Outcome, submitted
from pipeline.tables import QUERIES, history, migrate, write_rows
from postroom.chassis.postgres import connected, count_changed

_COLUMNS: Final = "mesh", "history_id", "broker_message_id", "sender", "to", "accepted_at", "body"


class Options(History, kw_only=True):
    """The options of `search-index`."""


def run(spark: SparkSession, options: Options) -> Outcome:
    """Index the messages that are not indexed yet, and delete the words of deleted ones."""
    asyncio.run(migrate(options.database_url))
    texts = history(spark, options).load().where("body IS NOT NULL").select(*_COLUMNS)
    write_rows(texts, options.database_url, QUERIES["index_messages"], ("mesh", "history_id"))

    async def forget() -> dict[str, int]:
        async with connected(options.database_url) as connection:
            deleted = await count_changed(connection, QUERIES["forget_words"], options.mesh)
            return {"indexed": await connection.fetchval(QUERIES["count_words"], options.mesh), "deleted": deleted}

    return Outcome(asyncio.run(forget()))


if __name__ == "__main__":
    submitted("search-index")
