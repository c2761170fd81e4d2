"""`postroom …`: the command line, one file per noun."""
