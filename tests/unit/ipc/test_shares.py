"""Whose turn it is, and who goes where there is no room: each step the same, however many callers there are."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest
from faults.virtual_time import virtual_loop

from ipc.connection import Connection
from ipc.server import OpenConnections
from ipc.shares import REQUEST, TURN, Turns
from outbox.model import Caller

MALLORY, ALICE, BOB = 1, 2, 3


@pytest.mark.parametrize(("others", "size"), [([], 8 * TURN), ([ALICE, BOB], TURN)], ids=["alone", "beside others"])
async def test_a_turn_holds_so_much_of_one_uids_work_and_no_more(others: list[int], size: int) -> None:
    turns = Turns()
    done = 0

    async def work() -> None:
        nonlocal done
        await turns.take(MALLORY, 1024)
        done += 1024

    for uid in others:
        await turns.take(uid, 1)
    working = [asyncio.create_task(work()) for _ in range(100)]
    most = before = 0
    while done < 100 * 1024:
        await asyncio.sleep(0)
        most, before = max(most, done - before), done
    assert most == size
    await asyncio.gather(*working)


async def test_who_is_not_in_line_waits_for_nobody() -> None:
    turns = Turns()
    line = [asyncio.create_task(turns.take(MALLORY, TURN)) for _ in range(1000)]
    await asyncio.sleep(0)
    assert turns.may_have(ALICE, 1)
    assert not turns.may_have(MALLORY, 1)
    for waiting in line:
        waiting.cancel()
    await asyncio.gather(*line, return_exceptions=True)
    await turns.take(MALLORY, 1)


async def test_a_request_counts_for_less_while_nobody_else_is_there() -> None:
    turns = Turns()
    assert turns.may_have(MALLORY, turns.request)
    alone = turns.request
    assert turns.may_have(ALICE, 1)
    assert alone < turns.request == REQUEST


async def test_who_is_not_in_line_is_not_held_up_by_the_rest_of_those_who_are() -> None:
    turns = Turns()
    await turns.take(ALICE, 1)
    line = [asyncio.create_task(turns.take(MALLORY, 100 * TURN)) for _ in range(3)]
    await line[1]
    for _ in range(20):
        assert turns.may_have(ALICE, REQUEST)
        await asyncio.sleep(0)
    for waiting in line:
        waiting.cancel()


@pytest.mark.parametrize(("size", "count"), [(TURN, 10), (TURN * 3 // 4, 20)])  # of the latter two are a turn
def test_small_pieces_of_work_in_line_do_not_wait_while_a_large_one_rests(size: int, count: int) -> None:
    """In virtual time: a rest of one or 32 ms is no longer where the machine is slow."""

    async def serve_both() -> None:
        turns = Turns()
        order: list[int] = []

        async def work(uid: int, count: int) -> None:
            await turns.take(uid, count)
            order.append(uid)

        working = [asyncio.create_task(work(MALLORY, 100 * TURN)) for _ in range(4)]
        small = [asyncio.create_task(work(ALICE, size)) for _ in range(count)]
        await asyncio.gather(*small)
        assert order.count(MALLORY) < len(working)
        await asyncio.gather(*working)

    with virtual_loop(Random(0)) as loop:
        loop.run_until_complete(serve_both())


async def test_one_large_piece_of_work_is_done_at_a_time_however_many_want_some() -> None:
    turns = Turns()
    done = 0

    async def work(uid: int) -> None:
        nonlocal done
        await turns.take(uid, 2 * TURN)
        await turns.take(uid, 2 * TURN)
        done += 1

    working = [asyncio.create_task(work(uid)) for uid in range(50)]
    most = before = 0
    while done < len(working):
        await asyncio.sleep(0)
        most, before = max(most, done - before), done
    assert most == 1
    await asyncio.gather(*working)


async def test_those_in_line_share_a_turn() -> None:
    turns = Turns()
    order: list[int] = []

    async def work(uid: int) -> None:
        await turns.take(uid, TURN // 2)
        order.append(uid)

    for uid in (ALICE, BOB):
        await turns.take(uid, 1)
    working = [asyncio.create_task(work(MALLORY)) for _ in range(50)]
    working += [asyncio.create_task(work(uid)) for uid in (ALICE, BOB) for _ in range(4)]
    await asyncio.gather(*working)
    assert {order.index(uid) for uid in (MALLORY, ALICE, BOB)} == {0, 2, 4}
    assert len(order) - 1 - order[::-1].index(BOB) < 20


class Guest:
    """A connection that counts how often it is looked at."""

    looks = 0

    def __init__(self, uid: int, *, busy: bool = False) -> None:
        self.caller = Caller(uid, uid)
        self._busy = busy

    @property
    def idle_since(self) -> float | None:
        Guest.looks += 1
        return None if self._busy else 1.0


def guests(count: int, uid: int, *, busy: bool = False) -> list[Connection]:
    return [cast(Connection, Guest(uid, busy=busy)) for _ in range(count)]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "counted as idle but busy"])
def test_making_room_looks_at_few_connections_however_many_there_are(busy: bool) -> None:  # noqa: FBT001 - a parameter
    connections = OpenConnections(4000)
    for guest in guests(4000, MALLORY, busy=busy):
        assert connections.enter(guest) is None
    Guest.looks = 0
    for newcomer in guests(100, ALICE):
        surplus = connections.enter(newcomer)
        assert surplus is None or surplus.caller.uid == MALLORY or busy
        connections.leave(surplus or newcomer)
    assert Guest.looks <= 100 * 8


def test_the_uid_with_the_most_connections_gives_up_its_longest_idle_one() -> None:
    connections = OpenConnections(5)
    first, second, third = guests(3, MALLORY)
    for guest in (first, *guests(2, ALICE), second, third):
        connections.enter(guest)
    connections.begins(first)
    (newcomer,) = guests(1, BOB)
    assert connections.enter(newcomer) is second
    connections.leave(second)
    connections.ends(first)
    assert connections.enter(guests(1, ALICE)[0]).caller.uid == ALICE  # type: ignore[union-attr]
    assert connections.count == 5  # whoever gives up a place is not counted while it is being closed
    connections.leave(newcomer)
    connections.leave(newcomer)
    assert connections.count == 4


def test_a_newcomer_takes_the_place_of_a_busy_connection_of_who_has_the_most_and_of_nobody_else() -> None:
    connections = OpenConnections(3)
    busy: list[Any] = guests(3, MALLORY)
    for guest in busy:
        connections.enter(guest)
        connections.begins(guest)
    assert connections.enter(guests(1, ALICE)[0]) is busy[0]
    connections.leave(busy[0])
    own = guests(1, MALLORY)[0]
    assert connections.enter(own) is own
