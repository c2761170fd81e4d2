"""An application's own database: the event outbox beside its tables, and the keys of what its handlers have handled.

It has the tables of delivering, as the broker's database does, and what is only of use where no broker's tables are
(its migrations). `postroom outbox install` makes them (docs/contract/delivery.md#delivery-90).
"""

from typing import Final

from postroom import delivery

ROOM: Final = __name__
ROOMS: Final = (delivery.ROOM, ROOM)
INSTALL: Final = "postroom outbox install"  # what makes them, and brings them up to date
