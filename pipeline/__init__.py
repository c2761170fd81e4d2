"""PySpark over the history: the pipelines that check it, measure it and write it elsewhere."""
