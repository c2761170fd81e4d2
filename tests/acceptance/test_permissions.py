"""Each program needs no more in NATS than docs/security.md lists."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import uuid4

import msgspec
import nats
import pytest
from support import slow_flow
from support.chain import READER, Chain
from support.effects import Remembering, Senders, accepted_by, everything_has_its_effect_once
from support.handlers import CountingHandler
from support.mailroom import MESH
from support.nats_users import Grants
from support.waiting import until, until_so
from support.zygote import Zygote

from postroom import BrokerClient
from postroom._wire.dead_letters import DEAD_LETTERS, Letter, LetterFilter, LettersQuery
from postroom._wire.jobs import StartJob
from postroom._wire.unpublished import CONSUMERS, ConsumerFilter, ConsumersQuery

_ROW = re.compile(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_GRANT = re.compile("`([^`]+)`")


def listed() -> Grants:
    """Read the table."""
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    table = text.partition("## Users of NATS")[2].partition("\n## ")[0]
    grants = {row[1]: (_GRANT.findall(row[2]), _GRANT.findall(row[3])) for row in _ROW.finditer(table)}
    del grants["program"]
    return grants


async def _operate(operator: BrokerClient, chain: Chain) -> None:
    """Do what an operator may: see, pause and delete consumers, follow a message, replay and drop dead letters."""
    (command,) = (await accepted_by(chain.room.database_url)).commands.values()
    story = await operator.trace(command)
    assert "emitted" in {step.what for step in story.steps}, story  # as the agent said
    names = {each.consumer for each in (await operator.list_things(CONSUMERS, ConsumersQuery())).consumers}
    assert {"counting", "counter_consumer"} < names
    for verb in ("pause", "resume"):
        done = await operator.change(CONSUMERS, verb, ConsumerFilter(ids=["counting"]), reason="a test")
        assert (len(done.done), done.failed) == (1, []), verb

    odd = await nats.connect(chain.nats.url)
    for subject in (f"{MESH}.inbox.{READER}", f"cmd.{MESH}.default.counter.run", f"{MESH}.event.orders.v1"):
        await odd.jetstream().publish(subject, b"{")  # which nobody can read
    await odd.close()

    async def letters() -> list[Letter]:
        return (await operator.list_things(DEAD_LETTERS, LettersQuery(mesh=MESH))).letters

    found = await until_so(letters, "three letters", holds=lambda letters: len(letters) == 3)
    streamed = [each for each in found if "/" in each.id]
    assert len(streamed) == 2, found  # of the agent and of the daemon
    for letter in found:
        (whole,) = (await operator.inspect(DEAD_LETTERS, MESH, letter.id)).letters
        assert whole.letter is not None
        done = await operator.change(
            DEAD_LETTERS, "replay", LetterFilter(ids=frozenset({letter.id})), reason="a test", mesh=MESH
        )
        assert (len(done.done), done.failed) == (1, [])
    await until_so(letters, "three more", holds=lambda letters: len(letters) == 3)
    done = await operator.change(DEAD_LETTERS, "drop", LetterFilter(), reason="a test", mesh=MESH)
    assert (len(done.done), done.failed) == (3, [])


@pytest.fixture
def own_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the worker find the flow of the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(slow_flow.__file__).parent))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("own_flow")
async def test_each_program_works_with_the_permissions_that_are_listed(
    short_directory: Path,
    database_url: str,
    redis_url: str,
    handler: CountingHandler,
    zygote: Zygote,
) -> None:
    effects = handler.answer
    assert isinstance(effects, Remembering)
    chain = Chain(short_directory, database_url, redis_url, handler.url, zygote=zygote, grants=listed())
    try:
        await chain.open(worker={"FLOWS": "slow_flow:flow"})
        load = Senders(chain.room.socket, 4)
        await load.write()
        await everything_has_its_effect_once(chain, handler, database_url)
        async with BrokerClient(chain.room.broker_urls[0], chain.room.admin_token) as operator:
            await _operate(operator, chain)
            request = msgspec.Raw(msgspec.json.encode({"begun": str(short_directory / "begun"), "go_on": "/"}))
            await operator.start_job(StartJob(mesh=MESH, flow="slow", first="work", id=uuid4(), request=request))
            await until(lambda: effects.effects("job_completed"))
    finally:
        chain.close()
    assert "Violation" not in (chain.directory / "nats" / "nats.log").read_text()
