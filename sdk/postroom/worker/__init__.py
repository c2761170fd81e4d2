"""The programs of the delivering side: the worker, consumers and agents, each a thin main."""
