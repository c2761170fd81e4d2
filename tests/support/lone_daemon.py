"""A daemon as a process of its own whose broker never answers: what it accepts it keeps."""

from __future__ import annotations

import asyncio
from pathlib import Path

from postroom import AsyncClient, PostroomError
from support.mailroom import Process


class LoneDaemon:
    """`python -m daemon` over a directory; started, killed and started again."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.socket = directory / "d.sock"
        self.state = directory / "state"
        token = directory / "member.token"
        token.touch(mode=0o600)
        token.write_text("a-token-that-nobody-checks")
        self.environment = {
            "POSTROOM_DAEMON_MESH": "demo",
            "POSTROOM_DAEMON_SOCKET_PATH": str(self.socket),
            "POSTROOM_DAEMON_STATE_DIRECTORY": str(self.state),
            "POSTROOM_DAEMON_BROKER_URL": "http://127.0.0.1:9",
            "POSTROOM_DAEMON_BROKER_TOKEN_FILE": str(token),
            **{f"POSTROOM_DAEMON_{name}": str(value) for name, value in settings.items()},
        }
        self.process = Process(directory, "daemon", self.environment)

    async def start(self) -> None:
        """Start it and return when it accepts."""
        self.process.start()
        async with AsyncClient(self.socket, patience=0) as client:
            while self.process.exit_code is None:
                try:
                    await client.ready()
                except PostroomError:
                    await asyncio.sleep(0.02)
                else:
                    return
        raise AssertionError(self.process.log())

    async def restart(self) -> None:
        """Kill it as a crash would, and start it again."""
        self.process.kill()
        await self.start()

    def stop(self) -> None:
        """Stop it, if it runs."""
        if self.process.exit_code is None:
            self.process.stop()
