"""The command `postroom`, under a name that no user's module has.

It may be typed anywhere, also where `PYTHONPATH` names a directory with a `cli/` or a `daemon/` of the user's. So it
forgets such directories before it imports anything of ours: what runs a user's code is another process.
"""

import os
import site
import sys


def main() -> None:
    """Run the command line and end the process."""
    given = sys.path.index(os.path.dirname(os.__file__))  # noqa: PTH120 - as Python writes it there
    del sys.path[:given]  # `PYTHONPATH`, and where this program or the caller is
    for directory in site.getsitepackages() if os.environ.get("PYTHONPATH") else ():
        site.addsitedir(directory)  # a checkout that is installed editable may have been in both

    try:
        from cli.main import main as run  # noqa: PLC0415
    except KeyboardInterrupt:  # what follows ends in the same way by itself
        sys.stderr.write("postroom: interrupted\n")
        sys.exit(130)
    run()
