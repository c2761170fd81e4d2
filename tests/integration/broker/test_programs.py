"""What programs report: who is listed for whom, what takes whose place, what is away, and what is forgotten."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any

import asyncpg
import msgspec
import pytest
from support.clocks import clock_ahead
from support.waiting import until_so

from broker.retention import Sweeper
from postroom._wire.programs import ProgramPage, Report
from postroom.delivery.programs import PostgresReports

PATH = "/v1/programs"
OURS = version("postroom-server")


def report(**fields: Any) -> dict[str, Any]:
    """What a daemon says that is well."""
    now = datetime.now(UTC).isoformat()
    said = {
        "host": "red",
        "pid": 1,
        "version": "1.0",
        "started_at": now,
        "at": now,
        "status": "ok",
        "address": "/run/d",
    }
    return said | fields


async def names(caller: Any, **query: str) -> list[tuple[Any, ...]]:
    answer = await caller.get(PATH, **query)
    assert answer.status == 200, answer.body
    return [(one.get("mesh"), one["name"], one["host"], one["pid"]) for one in answer.body["programs"]]


async def test_a_daemon_is_listed_as_the_member_that_its_token_says(broker: Any) -> None:
    said = report(
        waiting=3, dead=1, relay="paused", disk_free=5, totals={"queued": 9}, reasons=["so"], status="degraded"
    )
    assert (await broker.member("alice").post(PATH, said)).status == 204

    (listed,) = (await broker.admin.get(PATH)).body["programs"]
    kept = {name: value for name, value in listed.items() if name in said and name not in ("at", "started_at")}
    assert kept == {name: value for name, value in said.items() if name not in ("at", "started_at")}
    assert (listed["kind"], listed["mesh"], listed["name"]) == ("daemon", "demo", "alice")
    assert "away" not in listed
    assert abs(listed["clock_seconds"]) < 30


@pytest.mark.parametrize("field", ["at", "started_at", "oldest_at"])
@pytest.mark.parametrize(
    "moment",
    ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"],
)
async def test_a_report_from_outside_the_calendar_is_refused_and_hides_no_other(
    broker: Any, field: str, moment: str
) -> None:
    await broker.member("bob").post(PATH, report())
    answer = await broker.member("alice").post(PATH, report(**{field: moment}))
    assert (answer.status, answer.code, answer.body["field"]) == (400, "invalid_request", field)
    assert msgspec.convert((await broker.admin.get(PATH)).body, ProgramPage).programs[0].name == "bob"


@pytest.mark.parametrize("said", [{"status": "starting"}, {"reasons": "so"}, {"totals": {"x": -1}}, {"version": None}])
async def test_a_program_of_another_release_is_listed_whatever_it_reports(
    broker: Any, postgres: Any, said: dict[str, Any]
) -> None:
    await broker.member("bob").post(PATH, report())
    await broker.member("alice").post(PATH, report())
    odd = "UPDATE postroom.programs SET report = (report::jsonb || $1::jsonb)::json WHERE name = 'alice'"
    await postgres.execute(odd, msgspec.json.encode(said).decode())

    alice, bob = msgspec.convert((await broker.admin.get(PATH)).body, ProgramPage).programs
    assert (alice.name, alice.host, alice.address, alice.status) == ("alice", "red", "/run/d", "degraded")
    assert "of another release" in alice.reasons[0]
    assert (bob.name, bob.status) == ("bob", "ok")


@pytest.mark.parametrize("said", [{"relay": "draining"}, {"status": "starting"}, {"reasons": ["so"] * 21}])
async def test_a_report_with_what_this_release_does_not_know_is_taken_from_another_alone(
    broker: Any, said: dict[str, Any]
) -> None:
    assert (await broker.member("alice").post(PATH, report(**said))).status == 204
    (alice,) = msgspec.convert((await broker.admin.get(PATH)).body, ProgramPage).programs
    assert (alice.name, alice.version, alice.status) == ("alice", "1.0", "degraded")
    assert "of another release" in alice.reasons[0]

    answer = await broker.member("bob").post(PATH, report(**said, version=OURS))
    assert (answer.status, answer.body["field"]) == (400, *said)


async def test_members_see_the_daemons_of_their_mesh_alone(broker: Any) -> None:
    await broker.add_mesh("other", {"oscar": "member"})
    await broker.member("alice").post(PATH, report())
    await broker.member("oscar", "other").post(PATH, report())

    demo, other = ("demo", "alice", "red", 1), ("other", "oscar", "red", 1)
    assert await names(broker.admin) == [demo, other]
    assert await names(broker.admin, mesh="other") == [other]
    assert await names(broker.member("bob")) == [demo]
    assert (await broker.member("bob").get(PATH, mesh="other")).status == 403
    assert (await broker.admin.post(PATH, report())).status == 403


async def test_a_program_that_was_started_again_takes_its_own_place_and_no_others(broker: Any, postgres: Any) -> None:
    alice = broker.member("alice")
    for host, pid, address in (("red", 1, "/a"), ("red", 2, "/b"), ("blue", 1, "/a"), ("red", 3, "/a")):
        assert (await alice.post(PATH, report(host=host, pid=pid, address=address))).status == 204
    assert [name[2:] for name in await names(broker.admin)] == [("blue", 1), ("red", 2), ("red", 3)]

    await postgres.execute("UPDATE postroom.programs SET reported_at = now() - interval '31 s'")
    await alice.post(PATH, report(pid=4, address="/c"))
    assert [name[2:] for name in await names(broker.admin)] == [("blue", 1), ("red", 4)]


@pytest.mark.parametrize("since", [timedelta(seconds=31), timedelta(days=-3650)], ids=["silent", "under a clock ahead"])
async def test_what_has_not_reported_for_three_intervals_is_away(broker: Any, postgres: Any, since: timedelta) -> None:
    await broker.member("alice").post(PATH, report())
    await broker.member("bob").post(PATH, report())
    await postgres.execute("UPDATE postroom.programs SET reported_at = now() - $1::interval WHERE name = 'bob'", since)

    listed = (await broker.admin.get(PATH)).body["programs"]
    assert [(one["name"], one.get("away", False)) for one in listed] == [("alice", False), ("bob", True)]


async def test_a_clock_is_held_against_the_databases(broker: Any) -> None:
    ahead = datetime.now(UTC) + timedelta(hours=2)
    await broker.member("alice").post(PATH, report(at=ahead.isoformat()))
    (listed,) = (await broker.admin.get(PATH)).body["programs"]
    assert listed["clock_seconds"] == pytest.approx(7200, abs=60)


async def test_a_member_cannot_fill_the_table(broker: Any) -> None:
    alice = broker.member("alice")
    for pid in range(105):
        await alice.post(PATH, report(pid=pid, host=f"h{pid}"))
    assert len(await names(broker.admin)) <= 101
    assert ("demo", "alice", "h104", 104) in await names(broker.admin)


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "a\0b"},
        {"host": "x" * 300},
        {"pid": -1},
        {"status": "fine"},
        {"reasons": ["x"] * 21},
        {"at": "2026-01-01T00:00:00"},
    ],
)
async def test_a_report_that_is_none_is_refused(broker: Any, fields: dict[str, Any]) -> None:
    assert (await broker.member("alice").post(PATH, report(version=OURS, **fields))).status == 400
    assert await names(broker.admin) == []


async def test_texts_come_back_as_they_were_said(broker: Any) -> None:
    await broker.member("alice").post(PATH, report(reasons=["a\0b ' \" \\ é 🦀"], status="degraded"))
    (listed,) = (await broker.admin.get(PATH)).body["programs"]
    assert listed["reasons"] == ["a\0b ' \" \\ é 🦀"]


async def test_the_daemons_of_a_member_that_is_revoked_are_forgotten(broker: Any) -> None:
    for name in ("alice", "bob"):
        await broker.member(name).post(PATH, report())
    assert (await broker.admin.delete("/v1/members/demo/alice")).status == 204
    assert [name[1] for name in await names(broker.admin)] == ["bob"]


async def test_the_sweep_forgets_what_has_been_away_for_a_week(broker: Any, postgres: Any) -> None:
    for name in ("alice", "bob"):
        await broker.member(name).post(PATH, report())
    await postgres.execute("UPDATE postroom.programs SET reported_at = now() - interval '8 days' WHERE name = 'bob'")
    services = broker.services
    assert await Sweeper(services.database, services.config.retention, services.metrics).sweep()
    assert [name[1] for name in await names(broker.admin)] == ["alice"]


async def test_what_is_away_and_the_minutes_are_not_forgotten_by_a_clock_that_is_ahead(
    broker: Any, postgres: Any
) -> None:
    await broker.member("alice").post(PATH, report())
    await postgres.execute("UPDATE postroom.programs SET reported_at = now() - interval '8 days'")
    await postgres.execute("INSERT INTO postroom.minute_counts VALUES (now() - interval '8 days', 'handled', 1)")
    services = broker.services
    sweeper = Sweeper(services.database, services.config.retention, services.metrics)
    sweeper._clock = clock_ahead()

    assert await sweeper.sweep()
    assert [name[1] for name in await names(broker.admin)] == ["alice"]
    assert await postgres.fetchval("SELECT count(*) FROM postroom.minute_counts") == 1


async def test_a_broker_reports_itself_until_it_is_stopped(broker: Any, broker_process: Any) -> None:

    async def reports() -> bool:
        return bool(await names(broker.admin))

    await until_so(reports)
    (one,) = (await broker.admin.get(PATH)).body["programs"]
    assert (one["kind"], one["status"], one["address"]) == ("broker", "ok", broker_process.url)
    assert one["totals"] == {"accepted": 0}
    assert broker_process.terminate() == 0
    assert await names(broker.admin) == []


async def test_what_reports_count_is_known_by_the_minute(broker: Any, broker_database: str) -> None:
    async with asyncpg.create_pool(broker_database, min_size=1, max_size=1) as pool:
        one, other = (PostgresReports(pool, "worker", name) for name in ("one", "other"))
        for reports, totals in (
            (one, {"handled": 10, "dead_lettered": 0, "handled_in_2": 10}),
            (one, {"handled": 100, "dead_lettered": 1, "handled_in_2": 98, "handled_in_8": 2}),
            (other, {"handled": 5, "published": 7}),
            (other, {"handled": 5, "published": 7}),
        ):
            await reports.keep(msgspec.convert(report(totals=totals), Report))

    minutes = (await broker.admin.get("/v1/minutes", last="5")).body["minutes"]
    assert len(minutes) == 5
    told = [minute for minute in minutes if minute.keys() > {"at"}]  # two, where one was over meanwhile
    assert [sum(one.get(name, 0) for one in told) for name in ("handled", "dead_lettered")] == [105, 1]
    assert told[-1]["p99"] == 1.5 or len(told) == 2
    assert len((await broker.admin.get("/v1/minutes")).body["minutes"]) == 60
    assert (await broker.member("alice").get("/v1/minutes")).status == 403
    assert (await broker.admin.get("/v1/minutes", last="1441")).status == 400


async def test_minutes_are_forgotten_after_a_day_and_what_waited_after_two_hours(broker: Any, postgres: Any) -> None:
    await postgres.execute(
        "INSERT INTO postroom.minute_waiting "
        "SELECT now() - n * interval '50 minutes', 'S', 'c', 1 FROM generate_series(1, 5) AS n"
    )
    await postgres.execute(
        "INSERT INTO postroom.minute_counts "
        "SELECT now() - n * interval '1 hour', 'handled', 1 FROM generate_series(20, 30) AS n"
    )
    services = broker.services
    assert await Sweeper(services.database, services.config.retention, services.metrics).sweep()
    assert await postgres.fetchval("SELECT count(*) FROM postroom.minute_counts") == 4
    assert await postgres.fetchval("SELECT count(*) FROM postroom.minute_waiting") == 2
