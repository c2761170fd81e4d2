"""postroomd: the socket, the outbox and the relay in one process."""

from postroom.chassis import import_quickly

import_quickly()
