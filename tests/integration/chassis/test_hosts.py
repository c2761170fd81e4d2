"""A database URL may name several servers: the first that can be reached, and written to if that is asked, is taken."""

from __future__ import annotations

from urllib.parse import quote

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
