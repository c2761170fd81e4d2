"""A connection to NATS uses TLS where it is asked to, and is closed soon, whatever its server does."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from nats.errors import OutboundBufferLimitError

from embedded import EmbeddedNats
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings
from postroom.errors import Unavailable

LOOPBACK = Path(__file__).parents[1] / "broker_client" / "loopback"  # a certificate for 127.0.0.1
MEBIBYTE = bytes(2**20)
MORE_THAN_IS_BUFFERED = 64


async def test_a_server_that_takes_nothing_more_holds_up_no_close(short_directory: Path) -> None:
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    client = await connect(NatsSettings(url=server.url), name="test", patience=20)
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        for _ in range(MORE_THAN_IS_BUFFERED):
            with suppress(OutboundBufferLimitError, TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.publish("any", MEBIBYTE)
        async with asyncio.timeout(30):
            await client.close()
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
        server.stop()
    assert client.is_closed


class NatsWithTLS(EmbeddedNats):
    """One that accepts connections without TLS as well, as while its clients are moved to it."""

    def _write(self, config: dict[str, Any]) -> None:
        certificate = {"cert_file": str(LOOPBACK / "certificate.pem"), "key_file": str(LOOPBACK / "key.pem")}
        super()._write({**config, "tls": certificate, "allow_non_tls": True})


async def test_no_password_is_sent_without_tls_where_the_url_or_the_ca_file_asks_for_it(short_directory: Path) -> None:
    trusted = LOOPBACK / "certificate.pem"
    plain, safe = EmbeddedNats(short_directory / "plain"), NatsWithTLS(short_directory / "safe")
    plain.start()
    safe.start()

    async def secured(server: EmbeddedNats, scheme: str, ca_file: Path | None = None) -> bool:
        settings = NatsSettings(url=server.url.replace("nats:", f"{scheme}:"), ca_file=ca_file)
        client = await connect(settings, name="test", patience=3)
        transport = client._transport  # type: ignore[union-attr]
        encrypted = transport._io_writer.get_extra_info("ssl_object") is not None
        await client.close()
        return encrypted

    try:
        assert await secured(safe, "tls", trusted)
        assert await secured(safe, "nats", trusted)
        assert not await secured(safe, "nats")
        for scheme, ca_file in (("tls", None), ("tls", trusted), ("nats", trusted)):
            with pytest.raises(Unavailable, match="connecting to NATS: it does not speak TLS"):
                await secured(plain, scheme, ca_file)
        with pytest.raises(Unavailable, match=r"not trusted .*: name its authority in nats\.ca_file"):
            await secured(safe, "tls")
    finally:
        plain.stop()
        safe.stop()
