"""The daemon, built: the outbox, the link to the broker, the relay, the inbox and the socket server, and their order.

Start: refuse a second daemon, open the outbox (which recovers), listen, accept. Stop: accept no more, finish what is in
hand, let the relay settle its batch, close the outbox. Killed at any moment in between, the next start carries on.
"""

from __future__ import annotations

import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import structlog

from broker_client.link import BrokerLink
from broker_client.relay import Relay
from daemon.config import DaemonConfig, socket_path, state_directory, token_file
from daemon.metrics import expose
from daemon.receiver import Receiver
from daemon.service_manager import answer_watchdog, keep_status
from ipc.counters import Counters
from ipc.destinations import DestinationRule
from ipc.peers import Policy
from ipc.routes import routes
from ipc.server import Server
from ipc.services import NoInbox, Services
from ipc.tcp_guard import TcpGuard
from ipc.tokens import LocalToken
from outbox import Outbox
from postroom.chassis.listener import loopback_listener, refuse_path, remove, unix_listener
from postroom.chassis.runtime import listen_sockets

_log = structlog.get_logger(__name__)


class Postroomd:
    """Everything that runs in one daemon process."""

    def __init__(
        self,
        config: DaemonConfig,
        *,
        outbox: Outbox,
        link: BrokerLink,
        relay: Relay,
        receiver: Receiver | None,
        server: Server,
    ) -> None:
        self.config = config
        self.outbox = outbox
        self.link = link
        self.relay = relay
        self.receiver = receiver  # None: the config names no NATS, and there is no inbox
        self.server = server
        self._own: list[tuple[Path, int]] = []  # the socket files, with their inodes, that are ours to remove

    @classmethod
    async def open(cls, config: DaemonConfig, *, accept_lost_ids: bool = False) -> Self:
        """Build the rooms and open the outbox; raises `Fatal` that says what stands in the way.

        `accept_lost_ids` is for an outbox that a recovery could not save whole.
        """
        inherited = listen_sockets()
        if not inherited:
            refuse_path(socket_path(config))
        guard = None if config.tcp.port is None else TcpGuard(LocalToken(token_file(config)))
        state = state_directory(config)
        async with AsyncExitStack() as undo:
            link = await undo.enter_async_context(BrokerLink(config.broker))
            opening = Outbox.open(state, config.outbox, accept_lost_ids=accept_lost_ids, look_up=link.accepted)
            outbox = await undo.enter_async_context(await opening)
            relay = Relay(outbox, link, config.relay, state_directory=state, mesh=config.mesh)
            receiver = _receiver(config, state, relay)
            services = _services(config, outbox, link, relay, receiver)
            server = Server(
                routes(services),
                limits=config.limits,
                policy=services.policy,
                counters=services.counters,
                tcp_guard=guard,
            )
            daemon = cls(config, outbox=outbox, link=link, relay=relay, receiver=receiver, server=server)
            await daemon._listen(inherited)
            undo.pop_all()
        return daemon

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what has to run for as long as the daemon lives, by name."""
        receiving = {} if self.receiver is None else {"inbox": self.receiver.run()}
        return {
            **receiving,
            "relay": self.relay.run(),
            "comparison": self.relay.comparison.run(),
            "outbox": self.outbox.run_until_failure(),
            "pruning": self.outbox.prune_by_age(),
            "connections": self.server.sweep(),
            "watchdog": answer_watchdog(self.outbox),
            "status": keep_status(self.outbox, self.relay),
        }

    async def wind_down(self) -> None:
        """Accept no more, answer what is in hand, and let the relay settle its batch."""
        await self.server.stop(self.config.stop_seconds)
        await self.relay.stop()
        if self.receiver is not None:
            await self.receiver.stop(self.config.stop_seconds)

    async def close(self) -> None:
        """Close what is left: the outbox last but for the link. Safe after any failure."""
        for path, inode in self._own:
            remove(path, inode)
        try:
            await self.outbox.close()
        finally:
            await self.link.close()

    async def _listen(self, inherited: list[socket.socket]) -> None:
        """Serve the sockets that systemd passed in, else our own; and the TCP port where one is configured."""
        sockets = list(inherited)
        if not inherited:
            path = socket_path(self.config)
            sockets.append(unix_listener(path, self.config.socket.group))
            self._own.append((path, path.lstat().st_ino))
        if self.config.tcp.port is not None:
            sockets.append(loopback_listener(self.config.tcp.port))
        await self.server.start(sockets)
        for sock in sockets:
            _log.info("listening", address=str(sock.getsockname()), inherited=sock in inherited)


def _receiver(config: DaemonConfig, state: Path, relay: Relay) -> Receiver | None:
    if config.nats is None:
        return None
    return Receiver(
        config.nats,
        config.broker,
        config.inbox,
        mesh=config.mesh,
        state_directory=state,
        features=lambda: relay.features,
    )


def _services(
    config: DaemonConfig, outbox: Outbox, link: BrokerLink, relay: Relay, receiver: Receiver | None
) -> Services:
    counters = Counters()
    return Services(
        outbox=outbox,
        relay=relay,
        topics=link,
        inbox=receiver or NoInbox(),
        inbox_settings=config.inbox,
        mesh=config.mesh,
        version=version("postroom-server"),
        expose=partial(expose, counters, outbox, relay, receiver),
        limits=config.limits,
        policy=Policy(config.socket.allow_uids, config.socket.operators),
        counters=counters,
        destinations=DestinationRule(config.allow_destinations),
        late_seconds=config.relay.late_seconds,
        outbox_max_bytes=config.outbox.max_bytes,
    )
