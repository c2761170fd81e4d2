"""How a verb reaches the daemon or the broker: it passes a function that uses a client, and gets its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from cli.files import read_plain_file
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom import BrokerClient, Client
    from postroom.errors import PostroomError

T = TypeVar("T")

PATIENCE: Final = 2.0  # seconds that a person waits for a daemon that is just being restarted
RESTARTING: Final = 30.0  # seconds without any answer from a daemon or a broker that was there before
TIMEOUT: Final = 10.0  # seconds that one exchange may take


def with_daemon(
    socket: Path | None, work: Callable[[Client], T], *, patience: float = PATIENCE, timeout: float = TIMEOUT
) -> T:
    """Run `work` with a client of the daemon and return what it returns; `patience` and `timeout` are in seconds."""
    from postroom import Client  # noqa: PLC0415

    if timeout > TIMEOUT:  # else one that hangs would be waited for as long as what takes longest
        with Client(socket, patience=patience, timeout=TIMEOUT) as client:
            client.health()
    with Client(socket, patience=patience, timeout=timeout) as client:
        return work(client)


def with_broker(
    url: str | None,
    token_file: Path | None,
    work: Callable[[BrokerClient], Awaitable[T]],
    *,
    patience: float = PATIENCE,
    timeout: float = TIMEOUT,
) -> T:
    """Run `work` with a client of the broker at `url`, with the token in `token_file`."""
    import asyncio  # noqa: PLC0415

    from postroom import BrokerClient  # noqa: PLC0415

    if url is None:
        raise Fatal(Exit.USAGE, "no broker is configured: set POSTROOM_BROKER_URL, or --url")
    token = read_token(token_file)

    async def run() -> T:
        if timeout > TIMEOUT:  # else one that hangs would be waited for as long as what takes longest
            async with BrokerClient(url, token, patience=patience, timeout=TIMEOUT) as client:
                await client.whoami()
        async with BrokerClient(url, token, patience=patience, timeout=timeout) as client:
            return await work(client)

    return asyncio.run(run())


def advised(error: PostroomError, advice: str) -> PostroomError:
    """Return the error of a request that may have taken effect, with what makes a second try harmless."""
    from msgspec.structs import replace  # noqa: PLC0415

    return type(error)(replace(error.problem, detail=f"{error}; {advice}"))


def read_token(file: Path | None) -> str:
    """Read a bearer token from its file."""
    if file is None:
        raise Fatal(Exit.USAGE, "no token is configured: set POSTROOM_ADMIN_TOKEN_FILE, or --token-file")
    try:
        token = read_plain_file(file).decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise Fatal(Exit.CONFIG, f"{file} has no token: one line of plain text is expected") from error
    if not token or not token.isprintable():
        raise Fatal(Exit.CONFIG, f"{file} has no token: one line of text is expected")
    return token
