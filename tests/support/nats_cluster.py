"""Three servers of NATS as one cluster on loopback, any of which a test may kill and start again."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import nats
from nats.errors import Error
from nats.js import JetStreamContext

from embedded.nats import nats_server
from embedded.processes import tethered
from support.waiting import until_so

SERVERS = 3


class NatsCluster:
    """The servers `n0` to `n2`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports = _free_ports(2 * SERVERS)
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{port}" for port in self._ports[:SERVERS])

    def start(self, number: int) -> None:
        routes = [f"nats://127.0.0.1:{port}" for port in self._ports[SERVERS:]]
        config = {
            "server_name": f"n{number}",
            "host": "127.0.0.1",
            "port": self._ports[number],
            "jetstream": {"store_dir": str(self._directory / f"n{number}"), "max_file_store": 1 << 40},
            "cluster": {"name": "test", "host": "127.0.0.1", "port": self._ports[SERVERS + number], "routes": routes},
        }
        file = self._directory / f"n{number}.json"
        file.write_text(json.dumps(config))
        self._running[number] = subprocess.Popen(
            tethered([str(nats_server()), "-c", str(file)]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self, number: int) -> None:
        process = self._running.pop(number)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for number in list(self._running):
            self.kill(number)

    async def leader_of(self, js: JetStreamContext, stream: str) -> int:
        """Wait until a stream has a leader and all its copies are current; return the leader's number."""
        leaders: list[int] = []

        async def whole() -> bool:
            try:
                cluster = (await js.stream_info(stream)).cluster
            except Error:
                return False
            if cluster is None or not cluster.leader or not all(peer.current for peer in cluster.replicas or ()):
                return False
            leaders.append(int(cluster.leader.removeprefix("n")))
            return len(cluster.replicas or ()) == SERVERS - 1

        await until_so(whole)
        return leaders[-1]


@asynccontextmanager
async def running_cluster(directory: Path) -> AsyncIterator[tuple[NatsCluster, JetStreamContext]]:
    """Run a cluster for the length of the block; it has a leader when the block begins."""
    cluster = NatsCluster(directory)
    try:
        for number in range(SERVERS):
            cluster.start(number)
        await until_so(lambda: _answers(cluster.url.split(",")))
        connection = await nats.connect(cluster.url.split(","), max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        js = connection.jetstream()
        await until_so(lambda: _has_a_leader(js))
        yield cluster, js
        await connection.close()
    finally:
        cluster.stop()


async def _answers(urls: Sequence[str]) -> bool:
    try:
        for url in urls:
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.close()
            await writer.wait_closed()
    except OSError:
        return False
    return True


async def _has_a_leader(js: JetStreamContext) -> bool:
    try:
        await js.add_stream(name="PROBE", subjects=["probe"], num_replicas=SERVERS)
        await js.delete_stream("PROBE")
    except Error:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
