"""A process that only relays: `relay_process.py URL STATE_DIRECTORY TOKEN_FILE`, to be killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from broker_client import BrokerClientSettings, BrokerLink, Relay, RelaySettings
from outbox import Outbox


async def main(url: str, directory: Path, token_file: Path) -> None:
    link = BrokerLink(BrokerClientSettings(url=url, token_file=token_file))
    async with await Outbox.open(directory) as outbox, link:
        await Relay(outbox, link, RelaySettings(), state_directory=directory).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
