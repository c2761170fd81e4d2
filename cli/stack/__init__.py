"""Everything on this machine: the embedded servers, a broker and a daemon, below one state directory.

`up` starts a stack, `down` stops it, `status` looks at it, `demo` puts one through its paces.
"""

from cli.stack.layout import Layout, default_state_directory
from cli.stack.stack import Stack, fatal_failures

__all__ = ["Layout", "Stack", "default_state_directory", "fatal_failures"]
