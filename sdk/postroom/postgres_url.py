"""Why a Postgres URL cannot be used, in a sentence without the password that it may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

NO_URL: Final = "database_url is not a Postgres URL (postgresql://user@host/database)"
_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_REMEDY: Final = "name the authority's certificate with sslrootcert=FILE"


def why_refused(error: Exception) -> str:
    """Say what is wrong with a URL that asyncpg refused: one of its TLS options, else that it is none."""
    said = str(error).partition("\n")[0]
    if "certificate" in said or "`ssl" in said:  # of these asyncpg names only files and the values that there are
        return f"the TLS options of database_url cannot be used: {said}; {_REMEDY}"
    return NO_URL


def missing_file(url: str) -> str | None:
    """Say which file of a URL's TLS options cannot be read, None where all can."""
    try:
        query = parse_qs(urlsplit(url).query)
    except ValueError:
        return None
    for option in _FILES:
        for name in query.get(option, ()):
            try:
                Path(name).expanduser().open("rb").close()
            except OSError as error:
                return f"the TLS options of database_url cannot be used: {option}={name}: {error.strerror}"
    return None
