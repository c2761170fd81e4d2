"""Found by Spark itself, which imports every module named `pyspark_*` and asks it for its `DefaultSource`.

A failing import here would break every Python source of the session, so this imports nothing: the class comes when it
is asked for, and what it needs of Postroom when a write begins (docs/contract/spark.md#spark-1).
"""


def __getattr__(name: str) -> type:
    """Import `DefaultSource`, which needs PySpark alone, at its first use (PEP 562)."""
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyspark_postroom.source import DefaultSource  # noqa: PLC0415 - the reason for this function

    return DefaultSource
