"""A handler behind HTTP that only writes down which message came when: `python -m bench.handler PORT FILE`."""

from __future__ import annotations

import os
import re
import struct
import sys
import time
from pathlib import Path
from typing import Final

from aiohttp import web

RECORD: Final = struct.Struct("<Qd")  # the message's number, and when it came, in seconds since the epoch
_NUMBER: Final = re.compile(rb"number-(\d{12})")


class Notebook:
    """A file that any number of processes append their records to."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND)

    def note(self, message: bytes) -> None:
        """Write down that the message with the number in these bytes came now."""
        found = _NUMBER.search(message)
        if found is None:
            raise ValueError("a message without a number")
        os.write(self._file, RECORD.pack(int(found[1]), time.time()))


def main() -> None:
    """Serve on the port of loopback that the first argument names."""
    notebook = Notebook(Path(sys.argv[2]))

    async def handle(request: web.Request) -> web.Response:
        notebook.note(await request.read())
        return web.Response()

    async def here(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/handle", handle)
    app.router.add_get("/", here)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)


if __name__ == "__main__":
    main()
