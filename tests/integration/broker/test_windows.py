"""One suite for both windows of the limiter: in Redis, and in this process (docs/contract/accept.md#accept-26)."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from support.certificates import CERTIFICATE, KEY

from broker.config import LimiterConfig
from broker.limiter import Limiter, LocalWindow, RedisWindow, open_redis
from broker.metrics import Metrics
from postroom.chassis.exits import Exit, Fatal

LIMITS = LimiterConfig(per_mesh=5, per_member=3, window_seconds=3600, timeout_ms=5000)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = open_redis(redis_url, LIMITS)
    yield client
    await client.aclose()


@pytest.fixture(params=["redis", "local"])
def window(request: pytest.FixtureRequest, redis: Redis) -> LocalWindow | RedisWindow:
    return RedisWindow(redis, LIMITS) if request.param == "redis" else LocalWindow(LIMITS)


async def test_ids_pass_in_order_until_the_members_units_are_used_up(window: LocalWindow | RedisWindow) -> None:
    admission = await window.admit("demo", "alice", ["a", "b", "c", "d", "e"])

    assert admission.denied == {"d", "e"}
    assert 0 < admission.retry_after <= 3600


async def test_an_id_that_passed_passes_again_and_takes_nothing(window: LocalWindow | RedisWindow) -> None:
    await window.admit("demo", "alice", ["a", "b"])

    assert (await window.admit("demo", "alice", ["b", "c", "a"])).denied == set()
    assert (await window.admit("demo", "alice", ["a", "d", "c"])).denied == {"d"}


async def test_the_mesh_has_units_of_its_own(window: LocalWindow | RedisWindow) -> None:
    await window.admit("demo", "alice", ["a", "b", "c"])

    assert (await window.admit("demo", "bob", ["d", "e", "f"])).denied == {"f"}
    assert (await window.admit("other", "alice", ["a", "b", "c"])).denied == set()


async def test_a_denied_id_leaves_no_unit_behind(window: LocalWindow | RedisWindow) -> None:
    await window.admit("demo", "alice", ["a", "b", "c", "d"])
    await window.admit("demo", "alice", ["d"])

    assert (await window.admit("demo", "bob", ["d", "e"])).denied == set()


async def test_an_id_that_another_member_sent_takes_no_second_unit_of_the_mesh(
    window: LocalWindow | RedisWindow,
) -> None:
    await window.admit("demo", "alice", ["a", "b", "c"])

    assert (await window.admit("demo", "bob", ["a", "b", "c"])).denied == set()
    assert (await window.admit("demo", "carol", ["d", "e"])).denied == set()


async def test_a_full_window_lets_through_what_it_holds_and_nothing_else(window: LocalWindow | RedisWindow) -> None:
    await window.admit("demo", "alice", ["a", "b", "c"])
    await window.admit("demo", "bob", ["d", "e"])

    assert (await window.admit("demo", "alice", ["a", "b", "c"])).denied == set()
    assert (await window.admit("demo", "bob", ["f"])).denied == {"f"}


async def test_a_thousand_ids_go_in_one_call(window: LocalWindow | RedisWindow) -> None:
    admission = await window.admit("demo", "alice", [f"id-{n}" for n in range(1000)])

    assert len(admission.denied) == 997


async def test_every_key_in_redis_lies_in_the_meshs_slot_and_ends_by_itself(redis: Redis) -> None:
    await RedisWindow(redis, LIMITS).admit("demo", "alice", ["a"])

    keys = await redis.keys()
    assert len(keys) == 2
    assert all(key.startswith("postroom:limit:{demo}:") for key in keys)
    assert all([0 < await redis.pttl(key) <= 2 * 3600 * 1000 for key in keys])


async def test_the_local_window_begins_anew_with_the_clock() -> None:
    now = 7200.5
    window = LocalWindow(LIMITS, clock=lambda: now)
    first = await window.admit("demo", "alice", ["a", "b", "c", "d"])
    now += first.retry_after
    second = await window.admit("demo", "alice", ["d", "e", "f"])

    assert (first.denied, first.retry_after, second.denied) == ({"d"}, 3599.5, set())


async def test_the_window_in_redis_begins_anew_with_redis_clock(redis: Redis) -> None:
    brief = LimiterConfig(per_mesh=1, per_member=1, window_seconds=1, timeout_ms=5000)
    window = RedisWindow(redis, brief)
    await window.admit("demo", "alice", ["a"])
    (before,) = [key for key in await redis.keys() if not key.endswith(":alice")]
    while (await window.admit("demo", "alice", ["b"])).denied:
        pass

    assert [key for key in await redis.keys() if not key.endswith(":alice")] != [before]


async def test_a_redis_whose_certificate_is_not_trusted_is_said_to_be_that() -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE, KEY)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls)
    stranger = open_redis(f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", LIMITS)
    limiter = Limiter(RedisWindow(stranger, LIMITS), LIMITS, Metrics())
    await limiter.probe()
    why = r"Redis cannot be used: its certificate is not trusted \(.*\): name its authority in redis_url \(…\?ssl_ca"
    assert re.match(why, limiter.degraded or "")
    await stranger.aclose()
    server.close()


@pytest.mark.parametrize("option", ["ssl_ca_certs=/no/such.pem", f"ssl_ca_certs={KEY}", f"ssl_certfile={KEY}"])
def test_a_file_for_tls_that_cannot_be_used_ends_the_process(option: str) -> None:
    with pytest.raises(Fatal, match=r"redis_url: a file of ssl_ca_certs, .* cannot be used") as ended:
        open_redis(f"rediss://127.0.0.1:1/0?{option}", LIMITS)
    assert ended.value.exit_code is Exit.CONFIG
