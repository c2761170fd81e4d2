"""A database URL may name several servers: the first that can be reached, and written to if that is asked, is taken."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import connect, open_pool


async def test_a_url_with_several_hosts_reaches_the_one_that_answers(database_url: str) -> None:
    base, _, here = database_url.partition("?host=")
    several = f"{base}?host={quote('/nowhere', safe='')}%2C{here}&target_session_attrs=primary"
    connection = await connect(several)
    assert await connection.fetchval("SELECT pg_is_in_recovery()") is False
    await connection.close()
    pool = await open_pool(several, name="several", connections=1)
    assert await pool.fetchval("SELECT 1") == 1
    await pool.close()


async def test_a_server_that_is_not_there_is_no_missing_file(short_directory: Path) -> None:
    url = f"postgresql://any@/any?host={quote(str(short_directory), safe='')}"
    with pytest.raises(Fatal, match="nothing listens on its Unix socket") as refusal:
        await connect(url)
    assert refusal.value.exit_code is Exit.UNAVAILABLE
