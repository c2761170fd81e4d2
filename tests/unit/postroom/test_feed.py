from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from postroom._wire.batch import MAX_AHEAD, feed


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


async def async_numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


@pytest.mark.parametrize("count", [0, 1, MAX_AHEAD - 1, MAX_AHEAD, MAX_AHEAD + 1, 20_000])
async def test_every_kind_of_iterable_is_walked_in_order(count: int) -> None:
    expected = list(range(count))
    assert [each async for each in feed(expected)] == expected
    assert [each async for each in feed(numbers(count))] == expected
    assert [each async for each in feed(async_numbers(count))] == expected


async def test_an_error_comes_after_the_items_before_it() -> None:
    def broken() -> Iterator[int]:
        yield from range(5)
        raise KeyError("lost")

    items = feed(broken())
    assert [await anext(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="lost"):
        await anext(items)


async def test_a_reader_that_stops_stops_the_walk() -> None:
    drawn = 0
    ended = threading.Event()

    def endless() -> Iterator[int]:
        nonlocal drawn
        try:
            while True:
                drawn += 1
                yield drawn
        finally:
            ended.set()

    items = feed(endless())
    assert await anext(items) == 1
    await items.aclose()
    threads = [thread for thread in threading.enumerate() if thread.name == "postroom-feed"]
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert drawn <= 2 * MAX_AHEAD


async def test_a_slow_reader_is_not_overtaken() -> None:
    drawn = 0

    def endless() -> Iterator[int]:
        nonlocal drawn
        while True:
            drawn += 1
            yield drawn

    items = feed(endless())
    for _ in range(5 * MAX_AHEAD):
        taken = await anext(items)
        assert drawn - taken <= MAX_AHEAD + 1
    await items.aclose()
