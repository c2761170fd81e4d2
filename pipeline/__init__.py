"""PySpark over the history: the pipelines that check it, measure it and copy it elsewhere.

Each is a module of its own with `Options` and `run`, listed in `pipeline.runner`. `postroom pipeline run NAME` runs
it in a Spark session of this machine, `spark-submit` of its file on a cluster (docs/pipelines.md).
"""
