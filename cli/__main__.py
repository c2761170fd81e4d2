"""`python -m cli`: the command line, for programs that start it by name of the module."""

from cli.main import main

if __name__ == "__main__":
    main()
