"""`orphan-check`: every accepted message has all its rows (docs/contract/accept.md#accept-38).

It finds what `postroom broker orphan-check` finds, for databases where one statement takes too long. All tables are
read in one snapshot, so that it may run during accepts and sweeps. It writes nothing.
"""

from datetime import timedelta
from typing import Annotated, Final
from uuid import UUID

import msgspec
from pyspark.sql import DataFrame, SparkSession

from pipeline.runner import Database, Outcome, submitted
from pipeline.tables import Snapshot, columns, read_table, snapshot
from postroom._wire.accept import MIN_DEDUPE_DAYS
from postroom._wire.sql import load_queries
from postroom._wire.words import counted
from postroom.chassis.config import Days
from postroom.worker.orphans import Violation

_SQL: Final = load_queries("pipeline", "orphan_check.sql")
_ID_LIFE: Final = timedelta(days=MIN_DEDUPE_DAYS)

_ID: Final = "broker_message_id string"
_KIND: Final = "destination_kind string"
_PLACE: Final = "mesh_id integer, history_id long"


class Options(Database, kw_only=True):
    """The options of `orphan-check`."""

    events_kept_days: Annotated[
        Days, msgspec.Meta(description="least time that events are kept: older ones may have been deleted")
    ] = 30


def run(spark: SparkSession, options: Options) -> Outcome:
    """Check one snapshot of the database; the outcome has failed where there are violations."""
    with snapshot(options.database_url) as moment:
        violations = find_orphans(spark, moment, timedelta(days=options.events_kept_days))
    facts = {each.kind: f"{counted(each.rows, 'row')}: {', '.join(map(str, each.examples))}" for each in violations}
    return Outcome(facts or {"violations": 0}, failed=bool(violations))


def find_orphans(spark: SparkSession, moment: Snapshot, events_kept: timedelta) -> list[Violation]:
    """Return every violation, by kind, as `postroom.worker.orphans.check` does."""

    def read(table: str, *described: str, query: str = "table_rows") -> DataFrame:
        return read_table(spark, moment, table, query, columns(", ".join(described)))

    accepted_at, occurred_at = "accepted_at timestamp", "occurred_at timestamp"
    tables = {
        "dedupe": read("mesh.client_message_dedupe", _ID, _PLACE, _KIND, "history_available boolean"),
        "message": read("mesh.topic_message", _ID, _KIND, accepted_at, query="topic_message_rows").union(
            read("mesh.message_queue", _ID, _KIND, accepted_at, query="message_queue_rows")
        ),
        "history_row": read("mesh.message_history", _ID, _PLACE, "recipients integer"),
        "delivery": read("mesh.delivery_queue", _ID),
        "mention": read("mesh.mention_index", _ID),
        "dropped_delivery": read("postroom.dropped_deliveries", _ID),
        "announced": read("postroom.outbox_events", _ID, _KIND, occurred_at, query="event_rows").union(
            read("postroom.dropped_events", _ID, _KIND, occurred_at, query="event_rows")
        ),
    }
    for name, frame in tables.items():
        frame.persist().createOrReplaceTempView(f"postroom_{name}")  # each is asked several times
    cut = {"events_kept_from": moment.now - events_kept, "ids_kept_from": moment.now - _ID_LIFE}
    rows = spark.sql(_SQL["violations"].rstrip(";"), args=cut).collect()
    for frame in tables.values():
        frame.unpersist()
    return [Violation(row["kind"], row["rows"], [UUID(example) for example in row["examples"]]) for row in rows]


if __name__ == "__main__":
    submitted("orphan-check")
