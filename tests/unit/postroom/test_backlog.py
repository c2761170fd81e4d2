from __future__ import annotations

import asyncio

import pytest

from postroom._wire.batch import MAX_CHUNK_BYTES, MAX_CHUNK_LINES, MAX_WAITING, Backlog, Line


async def filled(count: int, size: int = 1) -> Backlog:
    backlog = Backlog()
    for number in range(1, count + 1):
        await backlog.put(Line(number, b"x" * size))
    return backlog


async def test_lines_come_out_as_they_went_in() -> None:
    backlog = await filled(3)
    assert [line.number for line in backlog.take()] == [1, 2, 3]
    assert backlog.take() == []


@pytest.mark.parametrize(("size", "most"), [(1, MAX_CHUNK_LINES), (MAX_CHUNK_BYTES // 4, 4), (2 * MAX_CHUNK_BYTES, 1)])
async def test_a_chunk_is_bounded_but_never_empty(size: int, most: int) -> None:
    backlog = await filled(MAX_CHUNK_LINES + 1, size)
    assert len(backlog.take()) == most


async def test_what_is_given_back_goes_first_and_in_order() -> None:
    backlog = await filled(4)
    taken = backlog.take()
    await backlog.put(Line(5, b"x"))
    backlog.give_back(taken[1:])
    assert [line.number for line in backlog.take()] == [2, 3, 4, 5]


async def test_a_full_backlog_holds_the_producer_up_until_lines_are_taken() -> None:
    backlog = await filled(MAX_WAITING)
    waiting = asyncio.create_task(backlog.put(Line(MAX_WAITING + 1, b"x")))
    await asyncio.sleep(0)
    assert not waiting.done()
    backlog.take()
    await waiting


async def test_a_closed_backlog_is_finished_once_it_is_empty() -> None:
    backlog = await filled(1)
    backlog.close()
    assert await backlog.filled()
    assert not backlog.finished
    backlog.take()
    assert backlog.finished
    assert not await backlog.filled()
