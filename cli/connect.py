"""How a verb reaches the daemon: it passes a function that uses a client, and gets its result; and a broker's token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec.structs import replace

from cli.files import read_plain_file
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom import Client
    from postroom.errors import PostroomError

T = TypeVar("T")

TOKEN_FILES: Final = ("POSTROOM_ADMIN_TOKEN_FILE", "POSTROOM_BROKER_TOKEN_FILE")  # the first that is set
NOT_ASKED: Final = "the broker was not asked: set POSTROOM_BROKER_URL and POSTROOM_ADMIN_TOKEN_FILE"
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


def advised(error: PostroomError, advice: str) -> PostroomError:
    """Return the error of a request that may have taken effect, with what makes a second try harmless."""
    return type(error)(replace(error.problem, detail=f"{error}; {advice}"))


def read_token(file: Path | None) -> str:
    """Read a bearer token from its file."""
    if file is None:
        raise Fatal(Exit.USAGE, "no token is configured: set POSTROOM_ADMIN_TOKEN_FILE, or --token-file")
    token = read_plain_file(file).strip()
    if not (token and token.isascii() and token.decode("ascii").isprintable()):
        raise Fatal(Exit.CONFIG, f"{file} has no token: one line of plain text is expected")
    return token.decode("ascii")
