"""Found by Spark itself, which imports every module named `pyspark_*` and asks it for its `DefaultSource`.

A failing import here would break every Python source of the session, so this imports nothing before it is asked.
"""


def __getattr__(name: str) -> type:
    """Import the source `postroom_history` as `DefaultSource` at its first use (PEP 562)."""
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from postroom.spark.formats import HistorySource  # noqa: PLC0415 - the reason for this function

    return HistorySource
