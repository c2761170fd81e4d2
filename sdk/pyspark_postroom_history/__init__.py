"""Found by Spark itself, which imports every module named `pyspark_*`: so it must import nothing at the top."""
