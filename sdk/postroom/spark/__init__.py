"""DataFrames in and out of Postroom: the sink `postroom` and the source `postroom_history`."""
