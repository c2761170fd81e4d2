"""What the programs of Postroom and the library's clients share: shapes on the wire, their checks, and how to ask.

Nothing here is for users: what they may import is in `postroom` and in the modules of it without an underscore.
"""
