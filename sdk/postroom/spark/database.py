"""A connection to the Postgres that the option `database_url` names, or `POSTROOM_DATABASE_URL`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NoReturn

from postroom._wire.retry import Patience, retrying
from postroom._wire.sql import UNUSABLE, unusable_file, why_failed, why_refused
from postroom.errors import InvalidMessage, NotPermitted, PostroomError, Unavailable

if TYPE_CHECKING:
    import asyncpg

DATABASE_URL: Final = "POSTROOM_DATABASE_URL"

_CONNECT_SECONDS: Final = 10.0
_SETTINGS: Final = {
    "application_name": "postroom-spark",
    "timezone": "UTC",
    "statement_timeout": "0",  # whatever the role or the database has set: a read takes as long as its consumer does
}


def chosen_url(option: str | None, purpose: str) -> str:
    """Return the option's URL, else the environment's; raises `InvalidMessage` with the `purpose` of the database."""
    url = option or os.environ.get(DATABASE_URL)
    if not url:
        refuse("database_url", f"no database {purpose} is configured: set {DATABASE_URL}, or the option database_url")
    return url


def refuse(option: str | None, sentence: str) -> NoReturn:
    """Raise `InvalidMessage` for an option."""
    raise InvalidMessage.of("invalid_option", sentence, field=option)


async def connect(url: str, settings: Mapping[str, str] | None = None) -> asyncpg.Connection[asyncpg.Record]:
    """Open a connection; raises `Unavailable`, and what no waiting helps against.

    That is `NotPermitted` for a login that is refused, `InvalidMessage` for a wrong `url`, and `PostroomError` where
    asyncpg is missing.
    """
    try:
        import asyncpg  # noqa: PLC0415 - of the extra `postgres`
    except ImportError as error:
        raise PostroomError.of("extra_missing", "asyncpg is missing: pip install 'postroom[postgres,spark]'") from error
    if (unusable := unusable_file(url)) is not None:
        refuse("database_url", unusable)
    try:
        return await asyncpg.connect(url, timeout=_CONNECT_SECONDS, server_settings=_SETTINGS | dict(settings or {}))
    except (*UNUSABLE, asyncpg.ClientConfigurationError) as error:
        raise InvalidMessage.of("invalid_option", why_refused(error), field="database_url") from error
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        detail = f"the database refused the login: correct database_url, or create the role or the database: {error}"
        raise NotPermitted.of("not_permitted", detail) from error
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        detail = f"cannot open the database: {why_failed(error)}"
        raise Unavailable.of("database_unavailable", detail, retryable=True) from error


@asynccontextmanager
async def connected(
    url: str, settings: Mapping[str, str] | None = None, *, seconds: float = 0.0
) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """Lend a connection, for which it waits up to `seconds` where Postgres is unavailable.

    Raises as `connect` does, and an error of ours for what Postgres fails with meanwhile.
    """
    connection = await retrying(lambda: connect(url, settings), Patience(seconds))
    import asyncpg  # noqa: PLC0415 - `connect` has imported it

    try:
        yield connection
        await connection.close(timeout=_CONNECT_SECONDS)
    except (
        OSError,
        asyncpg.PostgresConnectionError,
        asyncpg.InterfaceError,
        asyncpg.InternalClientError,
        asyncpg.OperatorInterventionError,
        asyncpg.TransactionRollbackError,
    ) as error:
        detail = f"the database has ended the connection or the statement: {why_failed(error)}"
        raise Unavailable.of("database_unavailable", detail, retryable=True) from error
    except (asyncpg.UndefinedFunctionError, asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError) as error:
        detail = (
            "this is not the broker's database, or it has tables of another version: name the broker's in "
            f"database_url, or run `postroom broker migrate` ({error})"
        )
        raise PostroomError.of("tables_missing", detail) from error
    except asyncpg.InsufficientPrivilegeError as error:
        detail = f"the role of database_url lacks the permission for this: grant it: {error}"
        raise NotPermitted.of("not_permitted", detail) from error
    except asyncpg.PostgresError as error:
        raise PostroomError.of("database_refused", f"the database refused: {error}") from error
    finally:
        connection.terminate()
