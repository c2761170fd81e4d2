"""Shares are dealt out by turns: round the meshes, and within a mesh round its members."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import pytest

from broker.shares import Shares, Slices
from postroom.errors import TryAgain


def member(name: str, mesh: str = "demo") -> tuple[str, str]:
    return mesh, name


class Crowd:
    """Members who want shares, and the order in which they got them."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.order: list[str] = []
        self._leave: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def wants(self, who: tuple[str, str], times: int = 1, amount: int = 1) -> None:
        self.tasks += [asyncio.create_task(self._hold(who, amount)) for _ in range(times)]
        await asyncio.sleep(0)

    async def _hold(self, who: tuple[str, str], amount: int) -> None:
        async with self.shares.hold(who, amount):
            self.order.append("/".join(who))
            leave = asyncio.Event()
            self._leave.append(leave)
            await leave.wait()

    async def one_leaves(self) -> None:
        """Let the one who has held longest leave, and those come whom that lets in."""
        self._leave.pop(0).set()
        for _ in range(3):
            await asyncio.sleep(0)

    async def all_leave(self) -> list[str]:
        while self._leave:
            await self.one_leaves()
        await asyncio.gather(*self.tasks)
        return self.order


async def test_a_mesh_holds_a_quarter_and_a_member_a_quarter_of_that() -> None:
    crowd = Crowd(Shares(32))
    await crowd.wants(member("alice"), 10)
    assert len(crowd.order) == 2
    for name in ("bob", "carol", "dave", "erin"):
        await crowd.wants(member(name), 10)
    assert len(crowd.order) == 8
    await crowd.wants(member("zoe", "other"), 1)
    assert crowd.order[8:] == ["other/zoe"]
    assert len(await crowd.all_leave()) == 51


async def test_turns_go_round_the_members_however_much_each_of_them_wants() -> None:
    crowd = Crowd(Shares(1))
    await crowd.wants(member("alice"), 8)
    await crowd.wants(member("bob"), 3)
    await crowd.wants(member("carol"), 2)
    order = await crowd.all_leave()
    assert [name.removeprefix("demo/") for name in order] == [
        *("alice", "alice", "bob", "carol"),
        *("alice", "bob", "carol", "alice", "bob"),
        *["alice"] * 4,
    ]


async def test_turns_go_round_the_meshes_however_many_members_each_of_them_has() -> None:
    crowd = Crowd(Shares(1))
    for number in range(6):
        await crowd.wants(member(f"m{number}", "large"), 2)
    await crowd.wants(member("zoe", "small"), 3)
    assert (await crowd.all_leave())[:8] == [
        *("large/m0", "large/m0", "small/zoe", "large/m1"),
        *("small/zoe", "large/m2", "small/zoe", "large/m3"),
    ]


async def test_what_is_larger_than_a_share_is_held_alone_and_nobody_overtakes_it_for_ever() -> None:
    crowd = Crowd(Shares(16))
    await crowd.wants(member("alice"), 1, amount=12)
    assert crowd.order == ["demo/alice"]
    await crowd.wants(member("alice"), 1)
    await crowd.wants(member("zoe", "other"), 1, amount=8)
    await crowd.wants(member("yan", "third"), 3, amount=1)
    assert crowd.order == ["demo/alice"]
    await crowd.one_leaves()
    assert crowd.order == ["demo/alice", "demo/alice", "other/zoe", "third/yan"]
    assert len(await crowd.all_leave()) == 6


async def test_who_waits_too_long_is_told_to_come_again_and_holds_nothing() -> None:
    shares = Shares(1, wait_seconds=0)
    async with shares.hold(member("alice")):
        with pytest.raises(TryAgain) as refusal:
            await shares.hold(member("bob")).__aenter__()
    assert (refusal.value.code, refusal.value.problem.status, refusal.value.problem.retry_after) == (
        "overloaded",
        503,
        1,
    )
    async with shares.hold(member("bob")), AsyncExitStack():
        pass


@pytest.mark.parametrize("turns", range(4))
async def test_who_gives_up_at_whatever_moment_leaves_nothing_behind(turns: int) -> None:
    shares = Shares(1)
    entered = asyncio.Event()

    async def hold(*_: Any) -> None:
        async with shares.hold(member("bob")):
            entered.set()
            await asyncio.Event().wait()

    async with shares.hold(member("alice")):
        waiting = asyncio.create_task(hold())
        await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(5), shares.hold(member("carol")):
        pass


async def test_a_mesh_rests_between_two_slices_while_another_one_is_there_and_not_while_it_is_alone() -> None:
    seconds = count(0, 0.001)  # each thing is a slice
    slices = Slices(lambda: next(seconds))
    beside = await _turns_of_the_loop(slices)
    while next(seconds) < 2:
        pass
    alone = await _turns_of_the_loop(slices)
    await slices.each(member("zoe", "other"), [1], lambda _: None)
    assert alone < beside / 4 > 0
    assert alone < await _turns_of_the_loop(slices) / 4


async def _turns_of_the_loop(slices: Slices) -> int:
    """Return how many turns the loop takes while a mesh has twenty slices."""
    working = asyncio.create_task(slices.each(member("alice"), range(20), lambda _: None))
    turns = 0
    while not working.done():
        await asyncio.sleep(0)
        turns += 1
    return turns
