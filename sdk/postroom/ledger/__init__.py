"""Jobs whose steps happen exactly once: the digits of the ledgers, their tables, and the primitives that move them."""

from typing import Final

ROOMS: Final = ("postroom.delivery", __name__)  # what a step sends goes through the event outbox, which is delivery's
