"""Found by Spark itself, which imports every module named `pyspark_*` and asks it for its `DefaultSource`.

A failing import here would break every Python source of the session, so this imports nothing before it is asked
(docs/contract/spark.md#spark-1).
"""


def __getattr__(name: str) -> type:
    """Import the sink `postroom` as `DefaultSource` at its first use (PEP 562)."""
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from postroom.spark.formats import Sink  # noqa: PLC0415 - the reason for this function

    return Sink
