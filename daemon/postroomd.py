"""The daemon: the outbox, the link to the broker, the relay, the inbox and the socket server, started in order.

A stop accepts no more, finishes running requests, lets the relay settle its batch and closes the outbox. After a kill
at any moment the next start continues. systemd's watchdog is fed by the event loop, and only after a transaction of the
outbox's writer has committed: a loop that hangs, or a writer that is stuck, starves it.
"""

import asyncio
import shutil
import time
from collections.abc import Coroutine, Hashable
from contextlib import AsyncExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Self

import structlog

from broker_client import BrokerLink, Relay, report_ends
from broker_client.answers import Outcome
from daemon.config import DaemonConfig, socket_path, state_directory, token_file
from daemon.metrics import Metrics
from daemon.receiver import Receiver
from ipc.control import health_of
from ipc.peers import DestinationRule, LocalToken, Policy, TcpGuard
from ipc.routes import metrics_routes, routes
from ipc.server import Server
from ipc.services import Counters, NoInbox, Services
from outbox import Outbox
from postroom._wire.programs import Report
from postroom.chassis import listener, runtime
from postroom.chassis.runtime import Reporter, keep_reporting
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)
STATUS_SECONDS: Final = 5.0


class Postroomd:
    """Everything that runs in one daemon process."""

    def __init__(
        self, config: DaemonConfig, outbox: Outbox, link: BrokerLink, address: str, guard: TcpGuard | None
    ) -> None:
        """Build the rooms over an open outbox; `address` is where callers find the daemon."""
        self.config = config
        self.outbox = outbox
        self.link = link
        self._state = state = state_directory(config)
        self.relay = relay = Relay(outbox, link, config.relay, state_directory=state, mesh=config.mesh)
        self.receiver: Receiver | None = None  # the config has no NATS, and there is no inbox
        if config.nats is not None:
            self.receiver = Receiver(
                config.nats,
                config.broker,
                config.inbox,
                mesh=config.mesh,
                state_directory=state,
                features=lambda: relay.features,
                confirmed_time=link.confirmed_time,
            )
        self._own: list[tuple[Path, int]] = []  # socket files that are ours to remove, with their inodes
        counters = Counters()
        self._services = Services(
            outbox=outbox,
            relay=relay,
            topics=link,
            inbox=self.receiver or NoInbox(),
            inbox_settings=config.inbox,
            mesh=config.mesh,
            version=version("postroom-server"),
            expose=Metrics(
                counters=counters,
                outbox=outbox,
                relay=relay,
                receiver=self.receiver,
                clock=link.clock,
                max_bytes=config.outbox.max_bytes,
                state=state,
            ).expose,
            limits=config.limits,
            policy=Policy(config.socket.allow_uids, config.socket.operators),
            counters=counters,
            destinations=DestinationRule(config.allow_destinations),
            late_seconds=config.relay.late_seconds,
            lost_sockets=lambda: [path for path, inode in self._own if not listener.is_still(path, inode)],
        )
        self.server = Server(
            routes(self._services),
            limits=config.limits,
            policy=self._services.policy,
            counters=counters,
            memory=self._services.budget,
            tcp_guard=guard,
        )
        # the metrics, where the config has a port for them
        self.page = Server(
            metrics_routes(self._services),
            limits=config.limits,
            policy=Policy(),
            counters=Counters(),
            memory=self._services.budget,
        )
        self._reporter = Reporter("postroom-server", address)

    @classmethod
    async def open(cls, config: DaemonConfig, *, accept_lost_ids: bool = False) -> Self:
        """Open the outbox, build the rooms and listen; raises `Fatal` where one of them cannot.

        `accept_lost_ids` is for an outbox that a recovery could not save whole.
        """
        inherited = runtime.listen_sockets()
        if not inherited:
            listener.refuse_path(socket_path(config))
        guard = None if config.tcp.port is None else TcpGuard(LocalToken(token_file(config)))
        async with AsyncExitStack() as undo:
            link = await undo.enter_async_context(BrokerLink(config.broker))
            outbox = await undo.enter_async_context(
                await Outbox.open(
                    state_directory(config),
                    config.outbox,
                    accept_lost_ids=accept_lost_ids,
                    earliest=_installed(config),
                    look_up=link.accepted,
                    steady_clock=lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000,
                )
            )
            address = str(inherited[0].getsockname() if inherited else socket_path(config))
            daemon = cls(config, outbox, link, address, guard)
            # serve the sockets that systemd passed in, else our own; and the TCP port where one is configured
            sockets = list(inherited)
            if not inherited:
                path = socket_path(config)
                sockets.append(listener.unix_listener(path, config.socket.group))
                daemon._own.append((path, path.lstat().st_ino))
            if config.tcp.port is not None:
                sockets.append(listener.tcp_listener(config.tcp.port))
            if config.metrics.listen_port is not None:
                scraped = listener.tcp_listener(config.metrics.listen_port, config.metrics.listen_host)
                await daemon.page.start([scraped])
                _log.info("listening_for_scrapes", address=str(scraped.getsockname()))
            await daemon.server.start(sockets)
            for sock in sockets:
                _log.info("listening", address=str(sock.getsockname()), inherited=sock in inherited)
            undo.pop_all()
        return daemon

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the tasks that run as long as the daemon, by name."""
        receiving = {} if self.receiver is None else {"inbox": self.receiver.run()}
        scrapes = {} if self.config.metrics.listen_port is None else {"scrapes": self.page.sweep()}
        return {
            **receiving,
            **scrapes,
            "relay": self.relay.run(),
            "comparison": self.relay.comparison.run(),
            "outbox": self.outbox.run_until_failure(),
            "pruning": self.outbox.prune_by_age(self.link.confirmed_time),
            "connections": self.server.sweep(),
            "watchdog": answer_watchdog(self.outbox),
            "reports": keep_reporting(self._report, self.link.report, self._glance),
            "ends": report_ends(self.outbox, self.link),
            "status": keep_status(self.outbox, self.relay),
        }

    async def wind_down(self) -> None:
        """Accept no more, finish running requests, and let the relay settle its batch."""
        await self.server.stop(self.config.stop_seconds)
        await self.page.stop(0)
        await self.relay.stop()
        if self.receiver is not None:
            await self.receiver.stop(self.config.stop_seconds)

    async def close(self) -> None:
        """Close what is left, the outbox and then the link. Safe after any failure."""
        for path, inode in self._own:
            listener.remove(path, inode)
        try:
            await self.outbox.close()
        finally:
            await self.link.close()

    async def _report(self) -> Report:
        """Build a report to the broker, which lists all programs (docs/contract/operate.md#operate-60)."""
        health = await health_of(self._services)
        room = await asyncio.to_thread(shutil.disk_usage, self._state)
        return self._reporter.report(
            health.reasons,
            waiting=health.rows["pending"] + health.rows["inflight"],
            dead=health.rows["dead"],
            oldest_at=health.oldest_pending_at,
            relay=health.relay.state,
            disk_free=room.free,
            totals={
                "queued": self._services.counters.sends["queued"],
                "relayed": self.relay.counters.attempts[Outcome.ACCEPTED],
            },
        )

    def _glance(self) -> Hashable:
        relay, outbox = self.relay.status(), self.outbox
        return outbox.healthy, outbox.disk_full, relay.state, relay.degraded, self._services.inbox.trouble()


def _installed(config: DaemonConfig) -> int:
    """Return a time in ms that has surely passed, even if the clock is behind: when program and token were written."""
    written = [Path(__file__).stat().st_mtime]
    with suppress(OSError):
        written.append(config.broker.token_file.stat().st_mtime)
    return round(max(written) * 1000)


async def answer_watchdog(outbox: Outbox) -> None:
    """Feed the watchdog, each time after a commit, at half its interval; for ever, also without a watchdog."""
    interval = runtime.watchdog_seconds()
    if interval is None:
        await asyncio.Event().wait()
    while interval is not None:
        with suppress(PostroomError):  # the outbox has failed: its own task ends the process
            await outbox.settle(())  # nothing to settle, but a transaction of the writer all the same
            runtime.notify("WATCHDOG=1", patience=0)
        await asyncio.sleep(interval / 2)


async def keep_status(outbox: Outbox, relay: Relay) -> None:
    """Update the line that `systemctl status` shows, for ever."""
    while True:
        counts = await outbox.counts()
        state = relay.status()
        backlog = counts.rows["pending"] + counts.rows["inflight"]
        reason = f" ({state.reason})" if state.reason else ""
        runtime.notify(f"STATUS={backlog} waiting, {counts.rows['dead']} dead; {state.state}{reason}", patience=0)
        await asyncio.sleep(STATUS_SECONDS)
