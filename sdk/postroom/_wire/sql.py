"""Named queries and numbered migrations from `.sql` files, so that there is no SQL in Python.

A file holds any number of queries; each begins with a line `-- name: <name>` and a line that says what it does:

    -- name: accept_lookup
    -- The rows that already hold one of these ids.
    SELECT …;

A package's migrations are `migrations/NNNN_name.sql`, forward only. Their numbers are the versions of its schema: the
next for each minor release that changes it, and for a major release the first of the next thousand (…, 0007, 1001, …).
`runs_on` is the one rule of which versions a program runs on.

`why_refused` says why a Postgres URL cannot be used, without the password that it may hold, `why_failed` what an error
of a database means to a reader. `leave_read_only` is what our pools of connections do with one that is given back.
"""

import re
import ssl
from configparser import Error as ServiceFileError
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from postroom._wire.http import why_unreachable

_NAME: Final = re.compile(r"^-- name: ([a-z0-9_]+)\n-- \S", re.MULTILINE)
UNUSABLE: Final = (ValueError, OverflowError, ServiceFileError)
"""What asyncpg raises for a URL that it cannot use, such as one with a port above 65535, or for its service file."""
NO_TLS: Final = "rejected SSL upgrade"  # what asyncpg says of a server without TLS

_NO_URL: Final = "is not a Postgres URL (postgresql://user@host/database; a / or # in a password is written %2F or %23)"
_NO_SERVICE: Final = "names a service of a file that cannot be read: write [name], then key=value lines; for % write %%"
_MAJOR: Final = 1000  # versions of a schema, at most, that one major release may have
_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_REMEDY: Final = "name the authority's certificate with sslrootcert=FILE"


class Queries(dict[str, str]):
    """The queries of one file by name; an unknown name is a `KeyError` when the module that uses it is imported."""

    def __init__(self, text: str) -> None:
        heads = list(_NAME.finditer(text))
        ends = [head.start() for head in heads[1:]] + [len(text)]
        super().__init__((head[1], text[head.start() : end].strip()) for head, end in zip(heads, ends, strict=False))
        if len(self) != text.count("-- name:"):
            raise ValueError("a query has no description, or a name is used twice")


def load_queries(package: str, file: str = "queries.sql") -> Queries:
    """Load the named queries of `package`."""
    return Queries(read_sql(package, file))


def read_sql(package: str, file: str) -> str:
    """Return the text of one `.sql` file of `package`."""
    return files(package).joinpath(file).read_text("utf-8")


def migrations(package: str, first: int = 1) -> list[tuple[int, str, str]]:
    """List `(version, name, sql)` of a package's migrations, in order; the first of them has the number `first`."""
    directory = files(package).joinpath("migrations")
    found = sorted(
        (int(entry.name[:4]), entry.name.removesuffix(".sql"), entry.read_text("utf-8"))
        for entry in (directory.iterdir() if directory.is_dir() else ())
        if re.fullmatch(r"\d{4}_[a-z0-9_]+\.sql", entry.name)
    )
    numbers = [first - 1, *(version for version, _, _ in found)]
    for before, number in pairwise(numbers):
        if number not in (before + 1, (before // _MAJOR + 1) * _MAJOR + 1):
            raise ValueError(f"in the migrations of {package} {number:04} follows {before:04}")
    return found


def runs_on(found: int, known: int) -> bool:
    """Return whether a program whose schema has the version `known` runs on version `found` (0: there are no tables).

    It runs on its own, on the one before and on the one after (docs/contract/operate.md#operate-4).
    """
    return found > 0 and abs(found - known) <= 1


def why_refused(error: Exception, what: str = "database_url") -> str:
    """Say what is wrong with a URL that asyncpg refused (`UNUSABLE`), `what`: one of its TLS options, or the whole."""
    if isinstance(error, ServiceFileError):  # its text quotes lines of the file, and so passwords
        return f"{what} {_NO_SERVICE}"
    said = str(error).partition("\n")[0]
    if "certificate" in said or "`ssl" in said:  # in these asyncpg quotes only files and the possible values
        return f"the TLS options of {what} cannot be used: {said}; {_REMEDY}"
    return f"{what} {_NO_URL}"


def why_failed(error: BaseException) -> str:
    """Say in words why a database did not do what it was asked: the first line of what it said, or of the system."""
    if isinstance(error, FileNotFoundError):
        return "nothing listens on its Unix socket"
    if isinstance(error, OSError):
        if NO_TLS in str(error):
            return "it does not speak TLS, which database_url asks for"
        return why_unreachable(error, "sslrootcert") or "no answer in time"
    return str(error).partition("\n")[0] or "no answer in time"


def unusable_file(url: str) -> str | None:
    """Say which file of a URL's TLS options cannot be used, None where all can."""
    try:
        query = {option: values[-1] for option, values in parse_qs(urlsplit(url).query).items()}
    except ValueError:
        return None
    tls, used = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ""
    try:
        for option in _FILES:
            if (found := query.get(option)) is not None:
                used = f"{option}={found}"
                Path(found).expanduser().open("rb").close()
        if "sslrootcert" in query:
            used = f"sslrootcert={query['sslrootcert']}"
            tls.load_verify_locations(Path(query["sslrootcert"]).expanduser())
        if "sslcert" in query and "sslkey" in query:
            used = f"sslcert={query['sslcert']} with sslkey={query['sslkey']}"
            certificate, key = (Path(query[option]).expanduser() for option in ("sslcert", "sslkey"))
            tls.load_cert_chain(certificate, key, lambda: query.get("sslpassword", ""))
    except ssl.SSLError:
        why = "give certificates as PEM, and with sslkey the key of sslcert, with sslpassword if it has a passphrase"
        return f"the TLS options of database_url cannot be used: {used}: {why}"
    except OSError as error:
        return f"the TLS options of database_url cannot be used: {used}: {error.strerror}"
    return None


async def leave_read_only(connection: Any) -> None:
    """End a connection of asyncpg that goes back to its pool where its server took no writes, as a standby does.

    Only a new one finds the server that takes them: after a failover the name of the host may lead elsewhere, and
    nothing breaks a connection to what is a standby now. Postgres reports both settings by itself, so it is asked for
    nothing: no program leaves its session changed. (A transaction left open is still ended.)
    """
    settings = connection.get_settings()
    if "on" in (getattr(settings, name, "off") for name in ("in_hot_standby", "default_transaction_read_only")):
        connection.terminate()
