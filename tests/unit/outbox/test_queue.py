"""Who comes into which group of the writer: each caller its part, where there are several."""

from __future__ import annotations

import asyncio

from outbox.accept import Accept
from outbox.model import Caller
from outbox.transaction import Step
from outbox.writer import PART_ROWS, Queue
from postroom._wire.message import prepare

MALLORY, ALICE = Caller(1, 1), Caller(2, 2)
SEND = prepare(b'{"to":"topic:orders"}')
OTHER: Step[None] = Step(lambda _: None, rows=5)


def put(queue: Queue, caller: Caller | None, rows: int = 1) -> None:
    operation = OTHER if caller is None else Accept.of([SEND] * rows, caller)
    queue.append(operation, asyncio.get_running_loop().create_future())


def callers(queue: Queue) -> list[Caller | None]:
    return [getattr(waiting.operation, "caller", None) for waiting in queue.take(1000)]


async def test_a_caller_that_is_alone_fills_the_group() -> None:
    queue = Queue()
    for _ in range(1001):
        put(queue, MALLORY)
    assert len(callers(queue)) == 1000
    assert len(callers(queue)) == 1
    assert not queue


async def test_beside_others_a_caller_has_its_part_of_a_group_and_everybody_is_in_the_next() -> None:
    queue = Queue()
    for _ in range(20):
        put(queue, MALLORY, PART_ROWS)
    put(queue, ALICE)
    put(queue, None)
    assert callers(queue) == [MALLORY, ALICE, None]
    assert callers(queue) == [MALLORY]


async def test_what_is_patient_goes_with_whatever_comes_next_until_it_is_flushed() -> None:
    queue = Queue()
    for _ in range(2):
        queue.append(OTHER, asyncio.get_running_loop().create_future(), patient=True)
    assert not queue
    put(queue, ALICE)
    assert callers(queue) == [None, None, ALICE]
    assert not queue
    queue.append(OTHER, asyncio.get_running_loop().create_future(), patient=True)
    queue.flush()
    assert queue
    assert callers(queue) == [None]


async def test_a_caller_counts_as_present_for_a_while() -> None:
    now = 0.0
    queue = Queue(lambda: now)
    put(queue, ALICE)
    assert callers(queue) == [ALICE]
    for _ in range(4):
        put(queue, MALLORY, PART_ROWS)
    assert callers(queue) == [MALLORY]
    now = 61.0
    assert callers(queue) == [MALLORY] * 3


async def test_an_operation_that_is_larger_than_a_group_goes_alone() -> None:
    queue = Queue()
    put(queue, MALLORY, 2000)
    put(queue, ALICE, 2000)
    put(queue, MALLORY, 2000)
    assert [callers(queue) for _ in range(3)] == [[MALLORY], [ALICE], [MALLORY]]


async def test_what_a_failure_leaves_is_taken_whole() -> None:
    queue = Queue()
    for caller in (MALLORY, ALICE, None, MALLORY):
        put(queue, caller, 700)
    taken = len(queue.take(1000))
    put(queue, ALICE)
    assert len(list(queue.drain())) == 5 - taken
    assert not queue
