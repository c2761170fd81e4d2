"""`python -m daemon --config FILE`: the daemon without the command line around it."""

import sys

from daemon.main import main

if __name__ == "__main__":
    sys.exit(main())
