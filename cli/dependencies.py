"""The servers that the environment names, as `postroom doctor` sees them: Postgres, Redis and NATS.

What is not named is not looked for: a machine that has only a daemon needs none of them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from postroom import PostroomError
from postroom.chassis.exits import Exit, Fatal, Finding

PATIENCE: Final = 5.0  # seconds that a person waits for NATS
_REDIS_MILLISECONDS: Final = 5000


async def look_at_servers(environ: Mapping[str, str] = os.environ) -> AsyncIterator[Finding]:
    """Yield a finding for each server that `environ` names; none shows an address, which may hold a password."""
    for subject, ask in (("postgres", _postgres), ("redis", _redis), ("nats", _nats)):
        variable = _VARIABLES[subject]
        if variable not in environ:
            continue
        try:
            yield Finding(subject, "ok", await ask(environ[variable], environ))
        except (PostroomError, Fatal) as error:
            remedy = f"start it (`postroom up` starts one of its own), or correct {variable}"
            yield Finding(subject, "failed", str(error), remedy)


_VARIABLES: Final = {
    "postgres": "POSTROOM_DATABASE_URL",
    "redis": "POSTROOM_REDIS_URL",
    "nats": "POSTROOM_NATS_URL",
}


async def _postgres(url: str, _: Mapping[str, str]) -> str:
    from postroom.chassis.postgres import connected  # noqa: PLC0415

    async with connected(url) as connection:
        version = connection.get_server_version()
    return f"version {version.major}.{version.minor} answers"


async def _redis(url: str, _: Mapping[str, str]) -> str:
    from redis.exceptions import RedisError  # noqa: PLC0415

    from broker.config import LimiterConfig  # noqa: PLC0415
    from broker.limiter import open_redis  # noqa: PLC0415

    redis = open_redis(url, LimiterConfig(timeout_ms=_REDIS_MILLISECONDS))
    try:
        await redis.ping()
    except (RedisError, OSError) as error:
        raise Fatal(Exit.UNAVAILABLE, f"Redis does not answer: {error}") from error
    finally:
        await redis.aclose()
    return "it answers"


async def _nats(url: str, environ: Mapping[str, str]) -> str:
    """Ask for JetStream, without which NATS is of no use here."""
    from postroom.delivery.errors import NATS_ERRORS, from_nats  # noqa: PLC0415
    from postroom.delivery.nats import connect  # noqa: PLC0415
    from postroom.delivery.settings import NatsSettings  # noqa: PLC0415

    file = environ.get("POSTROOM_NATS_CREDENTIALS_FILE")
    settings = NatsSettings(url=url, credentials_file=None if file is None else Path(file))
    connection = await connect(settings, name="postroom doctor", patience=PATIENCE, logged=False)
    try:
        await connection.jetstream().account_info()
    except NATS_ERRORS as error:
        raise from_nats(error, "asking for JetStream") from error
    finally:
        await connection.close()
    return "it answers, with JetStream"
