"""The page of a worker's process."""

import asyncio
from urllib.parse import urlsplit

from postroom.worker.process import serving_page


async def test_idle_connections_to_the_page_take_few_descriptors_and_keep_nobody_out() -> None:
    async with serving_page("127.0.0.1", 0, []) as url:
        address = urlsplit(url)
        streams = [await asyncio.open_connection(address.hostname, address.port) for _ in range(100)]
        try:
            for _, writer in streams[50:]:
                writer.write(b"GET /health HT")
            async with asyncio.timeout(60):
                assert [await reader.read() for reader, _ in streams[:36]] == [b""] * 36
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: page\r\nConnection: close\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
                writer.close()
        finally:
            for _, writer in streams:
                writer.close()
