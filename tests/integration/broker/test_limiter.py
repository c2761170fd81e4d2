"""The limiter, and a Redis that stops, forgets, is full or hangs (docs/contract/accept.md#accept-30)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs
from support.waiting import until_so

from broker.config import BrokerConfig, LimiterConfig
from broker.limiter import Admission
from embedded import EmbeddedRedis

Message = Callable[..., dict[str, Any]]


def limited(config: BrokerConfig, **limits: Any) -> BrokerConfig:
    wide = {"per_mesh": 1000, "per_member": 1000, "window_seconds": 3600, "timeout_ms": 2000, "breaker_failures": 1}
    return msgspec.structs.replace(config, limiter=LimiterConfig(**{**wide, **limits}))


@pytest.fixture
def own_redis(short_directory: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(short_directory / "redis")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def on_own_redis(migrated: BrokerConfig, own_redis: EmbeddedRedis) -> BrokerConfig:
    return msgspec.structs.replace(migrated, redis_url=own_redis.url)


async def test_a_message_over_the_limit_is_told_when_to_come_again(
    migrated: BrokerConfig, start_broker: Any, message: Message
) -> None:
    async with start_broker(limited(migrated, per_member=2)) as broker:
        await broker.add_mesh()
        answers = await broker.member("alice").send(*(message(f"id-{n}") for n in range(4)))

        assert [answer.status for answer in answers] == [201, 201, 429, 429]
        assert (answers[2].problem.code, answers[2].problem.retryable) == ("rate_limited", True)
        assert 0 < answers[2].problem.retry_after <= 3600
        assert broker.metric("postroom_broker_limiter_decisions_total", decider="redis", decision="denied") == 2


async def test_a_denied_message_hears_when_the_next_window_begins(
    broker: Any, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deny(_mesh: str, _member: str, ids: Sequence[str]) -> Admission:
        return Admission(frozenset(ids), 1234.5)

    monkeypatch.setattr(broker.services.limiter, "admit", deny)
    answer = await broker.member("alice").send_one(message("id-1"))

    assert (answer.status, answer.problem.retry_after) == (429, 1234.5)


async def test_a_retry_of_an_accepted_id_in_a_saturated_window_is_a_duplicate_and_costs_nothing(
    migrated: BrokerConfig, start_broker: Any, message: Message, redis_url: str
) -> None:
    async with start_broker(limited(migrated, per_member=2)) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        await alice.send(*(message(f"id-{n}") for n in range(3)))
        async with Redis.from_url(redis_url, decode_responses=True) as redis:
            taken = {key: await redis.scard(key) for key in await redis.keys()}
            retries = await alice.send(message("id-0"), message("id-2"), message("id-1"))

            assert [answer.status for answer in retries] == [200, 429, 200]
            assert {key: await redis.scard(key) for key in await redis.keys()} == taken


async def test_an_id_costs_one_unit_however_often_and_wherever_it_is_refused(
    migrated: BrokerConfig, start_broker: Any, message: Message
) -> None:
    async with start_broker(limited(migrated, per_member=4)) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        assert (await alice.send_one(message("id-0"))).status == 201
        malformed = {**message("id-1"), "request_fingerprint": "0" * 64}
        reused = message("id-0", body="something else")
        for _ in range(3):
            assert (await alice.send_one(malformed)).status == 400
            assert (await alice.send_one(message("id-2", "topic:nothing"))).status == 404
            assert (await alice.send_one(reused)).status == 409
        statuses = [answer.status for answer in await alice.send(message("id-3"), message("id-4"), malformed, reused)]

        assert statuses == [201, 429, 400, 409]
        assert broker.metric("postroom_broker_rate_limit_consumed_then_rejected_total") == 3


async def test_what_has_no_id_to_be_known_by_costs_a_unit_each_time(
    migrated: BrokerConfig, start_broker: Any, message: Message
) -> None:
    async with start_broker(limited(migrated, per_member=4)) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        nameless = [{}, message("id-0") | {"client_message_id": "a b"}, message("id-0") | {"request_fingerprint": "x"}]
        assert [answer.status for answer in await alice.send(*nameless)] == [400, 400, 400]
        assert [answer.status for answer in await alice.send(message("id-1"), message("id-2"))] == [201, 429]
        assert [answer.status for answer in await alice.send(*nameless, message("id-1"))] == [400, 400, 400, 200]


async def test_a_message_over_the_limit_is_not_even_looked_at(
    migrated: BrokerConfig, start_broker: Any, message: Message
) -> None:
    async with start_broker(limited(migrated, per_member=1)) as broker:
        await broker.add_mesh()
        malformed = {**message("id-1"), "request_fingerprint": "0" * 64}
        answers = await broker.member("alice").send(message("id-0"), malformed)
        assert [answer.status for answer in answers] == [201, 429]


async def test_without_redis_a_local_window_of_the_same_rate_decides_and_ready_says_so(
    on_own_redis: BrokerConfig, own_redis: EmbeddedRedis, start_broker: Any, message: Message
) -> None:
    async with start_broker(limited(on_own_redis, per_member=2)) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        assert (await broker.nobody.get("/ready")).body == {"status": "ok", "reasons": []}
        own_redis.stop()
        statuses = [answer.status for answer in await alice.send(*(message(f"id-{n}") for n in range(3)))]

        assert statuses == [201, 201, 429]
        ready = await broker.nobody.get("/ready")
        assert (ready.status, ready.body["status"], len(ready.body["reasons"])) == (200, "degraded", 1)
        assert broker.metric("postroom_broker_limiter_degraded") == 1


async def test_redis_decides_again_when_it_is_back(
    on_own_redis: BrokerConfig, own_redis: EmbeddedRedis, start_broker: Any, message: Message
) -> None:
    async with start_broker(limited(on_own_redis, breaker_seconds=0.001)) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        own_redis.stop()
        assert (await alice.send_one(message("id-1"))).status == 201
        own_redis.start()
        assert (await alice.send_one(message("id-2"))).status == 201

        assert broker.metric("postroom_broker_limiter_decisions_total", decider="local", decision="admitted") == 1
        assert broker.metric("postroom_broker_limiter_decisions_total", decider="redis", decision="admitted") == 1
        assert (await broker.nobody.get("/ready")).body["status"] == "ok"


async def test_a_redis_that_refuses_the_login_after_it_was_stopped_is_told_apart(
    on_own_redis: BrokerConfig, own_redis: EmbeddedRedis, start_broker: Any
) -> None:
    async with start_broker(limited(on_own_redis, breaker_seconds=0.001)) as broker:
        with capture_logs() as lines:

            async def said() -> list[str]:
                await broker.nobody.get("/ready")
                return [line["error"] for line in lines if line["event"] == "limiter_degraded"]

            own_redis.stop()
            assert "ConnectionError" not in (await said())[0]
            assert broker.services.limiter.degraded.startswith("Redis does not answer: ")
            own_redis.start()
            async with Redis.from_url(own_redis.url) as redis:
                await redis.config_set("requirepass", "another")
            await until_so(said, holds=lambda errors: "authenticated" in errors[-1])
            assert broker.services.limiter.degraded.startswith("Redis refuses the login: ")
            assert all(one != next_one for one, next_one in pairwise(await said()))


@pytest.mark.parametrize(("on_error", "status"), [("local", 200), ("closed", 503)])
async def test_a_redis_that_refuses_to_write_is_quoted_until_it_writes_again(
    on_own_redis: BrokerConfig, own_redis: EmbeddedRedis, start_broker: Any, on_error: str, status: int
) -> None:
    config = limited(on_own_redis, on_error=on_error, breaker_seconds=0.001)
    async with start_broker(config) as broker, Redis.from_url(own_redis.url) as redis:

        async def ready() -> Any:
            return await broker.nobody.get("/ready")

        await redis.config_set("maxmemory", 1)  # a unit that the broker took at its start holds for its second
        await until_so(ready, holds=lambda answer: answer.body["reasons"] and answer.status == status)
        again = await ready()
        assert again.status == status
        assert again.body["reasons"][0].startswith("Redis refuses a command (command not allowed when used memory")
        assert "script" not in again.body["reasons"][0]  # of the broker

        await redis.config_set("maxmemory", 0)  # Redis is asked again after a rest
        await until_so(ready, holds=lambda answer: answer.body == {"status": "ok", "reasons": []})


async def test_a_redis_that_takes_no_more_clients_is_told_from_one_that_does_not_answer(
    on_own_redis: BrokerConfig, own_redis: EmbeddedRedis, start_broker: Any
) -> None:
    config = limited(on_own_redis, breaker_seconds=0.001)
    async with start_broker(config) as broker, Redis.from_url(own_redis.url, single_connection_client=True) as redis:
        await redis.config_set("maxclients", 1)
        await redis.client_kill_filter(_type="normal", skipme=True)

        async def reasons() -> str:
            return " ".join((await broker.nobody.get("/ready")).body["reasons"])

        # a connection may also break before its refusal is read
        await until_so(reasons, holds=lambda said: "(max number of clients reached): raise its maxclients" in said)
        await redis.config_set("maxclients", 100)
        await until_so(reasons, holds=lambda said: not said)


async def test_closed_means_that_new_messages_wait_and_accepted_ones_are_still_answered(
    on_own_redis: BrokerConfig, own_redis: EmbeddedRedis, start_broker: Any, message: Message
) -> None:
    async with start_broker(limited(on_own_redis, on_error="closed")) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        await alice.send_one(message("id-1"))
        own_redis.stop()
        known, new = await alice.send(message("id-1"), message("id-2"))

        assert known.status == 200
        assert (new.status, new.problem.code, new.problem.retryable) == (503, "limiter_unavailable", True)
        assert (await broker.nobody.get("/ready")).status == 503
        assert (await broker.nobody.get("/health")).status == 200


async def test_a_flushed_redis_forgets_the_script_and_the_window_and_refuses_nothing_accepted(
    on_own_redis: BrokerConfig, own_redis: EmbeddedRedis, start_broker: Any, message: Message
) -> None:
    async with start_broker(limited(on_own_redis, per_member=2)) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        await alice.send(message("id-1"), message("id-2"))
        async with Redis.from_url(own_redis.url) as redis:
            await redis.flushall()
            await redis.script_flush()
        answers = await alice.send(message("id-1"), message("id-2"), message("id-3"))

        assert [answer.status for answer in answers] == [200, 200, 201]
        assert broker.metric("postroom_broker_limiter_decisions_total", decider="redis", decision="admitted") == 3


async def test_another_message_under_an_id_of_an_earlier_window_costs_a_unit(
    on_own_redis: BrokerConfig, own_redis: EmbeddedRedis, start_broker: Any, message: Message
) -> None:
    async with start_broker(limited(on_own_redis, per_member=2)) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        assert (await alice.send_one(message("id-0"))).status == 201
        async with Redis.from_url(own_redis.url) as redis:
            await redis.flushall()
        assert (await alice.send_one(message("id-0", body="something else"))).status == 409
        assert [answer.status for answer in await alice.send(message("id-1"), message("id-2"))] == [201, 429]


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
async def test_a_redis_without_memory_refuses_nothing_accepted_and_loses_nothing(
    on_own_redis: BrokerConfig, own_redis: EmbeddedRedis, start_broker: Any, message: Message, policy: str
) -> None:
    async with start_broker(limited(on_own_redis)) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        async with Redis.from_url(own_redis.url) as redis:
            await redis.config_set("maxmemory-policy", policy)
            await redis.config_set("maxmemory", 1)
        ids = [f"id-{n}" for n in range(50)]
        first = await alice.send(*map(message, ids))
        again = await alice.send(*map(message, ids))

        assert {answer.status for answer in first} == {201}
        assert {answer.status for answer in again} == {200}


async def test_a_redis_that_hangs_costs_one_deadline_and_then_nothing(
    on_own_redis: BrokerConfig, own_redis: EmbeddedRedis, start_broker: Any, message: Message
) -> None:
    async with start_broker(limited(on_own_redis, timeout_ms=50, breaker_seconds=3600)) as broker:
        await broker.add_mesh()
        async with Redis.from_url(own_redis.url) as redis:
            await redis.execute_command("CLIENT", "PAUSE", 5_000, "ALL")
            answers = [await broker.member("alice").send_one(message(f"id-{n}")) for n in range(20)]

        assert {answer.status for answer in answers} == {201}
        assert broker.metric("postroom_broker_limiter_decisions_total", decider="local", decision="admitted") == 20


async def test_without_a_redis_in_the_config_a_broker_limits_by_itself_and_says_so(
    migrated: BrokerConfig, start_broker: Any, message: Message
) -> None:
    alone = msgspec.structs.replace(limited(migrated, per_member=2), redis_url=None)
    async with start_broker(alone) as broker:
        await broker.add_mesh()
        answers = await broker.member("alice").send(*(message(f"id-{n}") for n in range(3)))
        ready = await broker.nobody.get("/ready")

        assert [answer.status for answer in answers] == [201, 201, 429]
        assert broker.metric("postroom_broker_limiter_decisions_total", decider="local", decision="admitted") == 2
        reason = "no Redis is configured (redis_url): each broker limits by itself"
        assert (ready.status, ready.body) == (200, {"status": "degraded", "reasons": [reason]})
