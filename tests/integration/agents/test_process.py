"""`postroom agent …` as processes: the example answers commands, is stopped, looked at and checked."""

import asyncio
import json
import os
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import NamedTuple

import pytest
from support.agents import emitted, settled
from support.jetstream import Context
from support.waiting import until_so
from support.zygote import Piped

from embedded.processes import tethered
from postroom.chassis.ownership import this_user

EXAMPLES = Path(__file__).parents[3] / "examples"
AGENT = "counting_agent:Counter"
DURABLE = "counter_consumer"


class Ended(NamedTuple):
    code: int
    output: str
    said: str


class CommandLine:
    """`postroom agent` for one context, with a state directory of its own."""

    def __init__(self, context: Context, nats_url: str, state: Path) -> None:
        self.context = context
        self.database = state / "events.db"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(EXAMPLES),
            "POSTROOM_NATS_URL": nats_url,
            "POSTROOM_MESH": context.name,
            "POSTROOM_AGENT_STATE_DIRECTORY": str(state),
        }

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *tethered([sys.executable, "-m", "cli", "agent", *arguments]),
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str) -> Ended:
        process = await self.start(*arguments)
        output, said = await process.communicate()
        assert process.returncode is not None
        return Ended(process.returncode, output.decode(), said.decode())

    async def begin(self, agent: str) -> Piped:
        """Run what `postroom agent run` becomes, as other tests do."""
        return await Piped.start(["-m", "postroom.worker", "agent", "--", agent], self.environment)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the example for the length of the block, from when it is ready on; it has to stop in order."""
        process = await self.begin(AGENT)
        lines = [line async for line in until_ready(process.stderr)]
        assert b'"event":"ready"' in lines[-1], lines
        yield
        process.terminate()
        code, said = await process.communicate()
        assert code == 0, said.decode()

    async def settled(self) -> None:
        """Return when every command was handled and acknowledged."""
        await settled(self.context, DURABLE, f"{self.context.name}_COMMANDS".upper())

    async def command(self, *ids: str) -> None:
        await self.context.publish(ids, b'{"sender":"alice"}', f"cmd.{self.context.name}.default.counter.run")


@pytest.fixture
def command_line(context: Context, nats_url: str, tmp_path: Path) -> CommandLine:
    return CommandLine(context, nats_url, tmp_path)


async def until_ready(stderr: asyncio.StreamReader) -> AsyncIterator[bytes]:
    async for line in stderr:
        yield line
        if b'"event":"ready"' in line:
            return


async def answers(context: Context) -> list[str]:
    return list((await emitted(context, "command_counted")).elements())


async def test_the_example_answers_each_command_with_a_message(command_line: CommandLine):
    context = command_line.context
    await command_line.command("c-1", "c-2", "c-3")
    async with command_line.running():
        await command_line.settled()
    replayed = json.loads((await command_line.run("replay", AGENT, "--json")).output)
    assert (replayed["state"], replayed["position"], replayed["agent"]) == (3, 6, "counter")
    verified = await command_line.run("verify", AGENT, "--hash", replayed["state_hash"])
    assert (verified.code, verified.output.splitlines()[-1]) == (0, "ok")
    found = await answers(context)
    assert (len(found), len(set(found))) == (3, 3)


async def test_what_an_agent_did_with_a_message_and_emitted_is_told_on_its_host(command_line: CommandLine):
    await command_line.command("c-1", "c-2")
    async with command_line.running():
        await command_line.settled()
    with closing(sqlite3.connect(command_line.database)) as db:
        query = "SELECT record ->> '$.envelope.id', stream, stream_sequence FROM event JOIN outgoing USING (position)"
        (effect, stream, sequence), _ = db.execute(query)
    for name in ("c-1", effect):
        told = json.loads((await command_line.run("trace", AGENT, "--message", name, "--json")).output)
        assert [(step["what"], step["thing"]) for step in told["steps"]] == [
            ("handled", "c-1"),
            ("emitted", effect),
            ("published", effect),
        ]
        assert [step.get("parent") for step in told["steps"]] == [None, "message:c-1", f"message:{effect}"]
        assert told["steps"][2]["place"] == f"{stream} #{sequence}"
        assert told["waits"] == []
    with closing(sqlite3.connect(command_line.database)) as db:
        db.execute(
            "UPDATE outgoing SET published_at = NULL, epoch = 1, stream = NULL, stream_created_at = NULL, "
            "stream_sequence = NULL"
        )
        db.commit()
    told = json.loads((await command_line.run("trace", AGENT, "--message", "c-1", "--json")).output)
    assert [(step["what"], step["outcome"]) for step in told["steps"]] == [("handled", "done"), ("emitted", "waiting")]
    assert [wait["step"] for wait in told["waits"]] == [f"message:{effect}"]
    unknown = await command_line.run("trace", AGENT, "--message", "c-9")
    assert (unknown.code, "has nothing under the id" in unknown.said) == (3, True)


async def test_an_agent_waits_for_a_stream_that_is_declared_after_its_start(command_line: CommandLine):
    await command_line.context.remove()
    process = await command_line.start("run", AGENT)

    async def opened() -> bool:
        return command_line.database.exists()

    await until_so(opened, "for the store, which is opened before the stream is looked for")
    await command_line.context.declare()
    assert process.stderr is not None
    assert b'"event":"ready"' in [line async for line in until_ready(process.stderr)][-1]
    process.terminate()
    await process.communicate()
    assert process.returncode == 0


async def test_two_processes_of_one_agent_share_the_work(command_line: CommandLine):
    context = command_line.context
    async with command_line.running(), command_line.running():
        await command_line.command(*(f"c-{number}" for number in range(200)))
        await command_line.settled()
    replayed = json.loads((await command_line.run("replay", AGENT, "--json")).output)
    assert replayed["state"] == 200
    found = await answers(context)
    assert (len(found), len(set(found))) == (200, 200)


async def test_a_store_that_was_altered_is_found_by_verify_and_nothing_runs_on_it(command_line: CommandLine):
    await command_line.command("c-1", "c-2")
    async with command_line.running():
        await command_line.settled()
    with closing(sqlite3.connect(command_line.database)) as db:
        db.execute("DROP TRIGGER event_append_only_update")
        db.execute("UPDATE event SET record = replace(record, 'alice', 'mally') WHERE position = 3")
        db.commit()
    verified = await command_line.run("verify", AGENT, "--json")
    assert (verified.code, json.loads(verified.output)["first_difference"]) == (1, 3)
    assert "was altered at position 3" in verified.said
    assert (await command_line.run("replay", AGENT)).code == 1
    assert (await command_line.run("run", AGENT)).code == 78


@pytest.mark.parametrize(
    "left",
    [{"-wal": None}, {"": b"", "-wal": None}, {"": None}, {"": b""}],
    ids=["its log alone", "its log beside an empty file", "without its log", "empty and without its log"],
)
async def test_a_store_that_lost_its_content_is_not_taken_for_a_new_one_and_keeps_its_log(
    command_line: CommandLine, left: dict[str, bytes | None]
):
    database, log = command_line.database, Path(f"{command_line.database}-wal")
    await command_line.command("c-1")
    async with command_line.running():
        await command_line.settled()
        copies = {part: Path(f"{database}{part}").read_bytes() for part in ("", "-wal")}  # as a kill leaves them
    database.unlink()
    for part, content in left.items():
        Path(f"{database}{part}").write_bytes(copies[part] if content is None else content)
    for verb, code in (("verify", 1 if database.exists() else 3), ("run", 78), ("run", 78)):
        ended = await command_line.run(verb, AGENT)
        assert (ended.code, f"{database}" in ended.said) == (code, True), ended.said
    assert "restore a copy" in ended.said
    assert ("-wal" in left, log.exists() and log.read_bytes() == copies["-wal"]) in ((True, True), (False, False))
    database.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    async with command_line.running():  # as one that starts empty
        pass


async def test_what_an_agent_published_is_published_again_by_hand(command_line: CommandLine):
    context = command_line.context
    command_line.environment["POSTROOM_AGENT_AGENT_CHECK_SECONDS"] = "0.1"
    republish = ("republish", AGENT, "--since", "2026-01-31", "--json")
    await command_line.command("c-1", "c-2")
    async with command_line.running():
        await command_line.settled()
        first = sorted(await answers(context))
        assert json.loads((await command_line.run(*republish, "--dry-run")).output) == {"messages": 2}
        why = ("--reason", "an older copy", "--yes")
        assert json.loads((await command_line.run(*republish, *why)).output) == {"messages": 2}

        async def again() -> bool:
            return sorted(await answers(context)) == sorted([*first, *(f"{message_id}/1" for message_id in first)])

        await until_so(again, "they are there a second time, under a fresh id")
    assert sorted(await answers(context)) == sorted([*first, *(f"{message_id}/1" for message_id in first)])
    with closing(sqlite3.connect(command_line.database)) as db:
        (logged,) = db.execute("SELECT actor, verb, subject, reason FROM operator_log")
    assert logged[:2] == (this_user(), "republish")
    assert logged[2].startswith("2 messages published since ")
    assert logged[3] == "an older copy"


SILENT = """
from counting_agent import Counter as Counting

class State(int):
    def __str__(self):
        raise LookupError("no text")

class Counter(Counting):
    name = "counter"

    def apply(self, state, event):
        return State(super().apply(state, event))
"""


async def test_a_state_that_has_no_text_is_said_so_with_its_hash(command_line: CommandLine, tmp_path: Path):
    (tmp_path / "silent.py").write_text(SILENT)
    command_line.environment["PYTHONPATH"] += f":{tmp_path}"
    await command_line.command("c-1")
    async with command_line.running():
        await command_line.settled()
    state_hash = json.loads((await command_line.run("replay", AGENT, "--json")).output)["state_hash"]
    replayed = await command_line.run("replay", "silent:Counter")
    sentence = "the state of silent:Counter cannot be written as text: LookupError: no text"
    assert (replayed.code, replayed.said) == (1, f"postroom: {sentence}; its hash is {state_hash}; correct its class\n")


async def test_a_store_that_is_not_there_cannot_be_published_again(command_line: CommandLine):
    ended = await command_line.run("republish", AGENT, "--since", "2026-01-31", "--reason", "x", "--yes")
    assert "there is no event store" in ended.said
    assert not command_line.database.exists()


async def test_another_hash_than_the_expected_one_is_a_failure(command_line: CommandLine):
    async with command_line.running():
        pass
    verified = await command_line.run("verify", AGENT, "--hash", "00" * 31 + "01")
    assert verified.code == 1
    assert "its state hash is not" in verified.said
    assert "ok" not in verified.output.splitlines()


@pytest.mark.parametrize(
    ("ends", "how"), [("os._exit(0)", "exit code 0"), ("os._exit(5)", "exit code 5"), ("os.abort()", "signal 6")]
)
async def test_an_agent_that_ends_the_process_that_loads_it_is_named(
    command_line: CommandLine, tmp_path: Path, ends: str, how: str
):
    (tmp_path / "ending.py").write_text(f"import os\n{ends}\n")
    command_line.environment["PYTHONPATH"] = str(tmp_path)
    ended = await command_line.run("replay", "ending:Agent")
    assert ended.code == 1
    assert f"postroom: ending:Agent ended the process that loaded it ({how}) and said nothing" in ended.said


LEAVING = """
import asyncio, sys
from postroom.agent import Agent

class Leaving(Agent):
    subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)

    async def receive(self, envelope):
        if envelope.id == "poison":
            HOW

async def together(*works):
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)

async def leave():
    sys.exit()
"""


@pytest.mark.parametrize(
    "how",
    [
        "left = asyncio.create_task(leave()); await asyncio.sleep(5)",
        "await together(asyncio.sleep(5), leave())",  # which raises the same in the handler as well
    ],
)
async def test_a_message_that_leaves_a_task_behind_which_ends_the_process_is_a_dead_letter_in_the_end(
    command_line: CommandLine, tmp_path: Path, how: str
):
    (tmp_path / "leaving.py").write_text(LEAVING.replace("HOW", how))
    more = {"PYTHONPATH": str(tmp_path), "POSTROOM_AGENT_MAX_DELIVER": "2", "POSTROOM_AGENT_ACK_WAIT_SECONDS": "1"}
    command_line.environment |= more
    context = command_line.context
    await context.publish(["poison"], b"{}", f"cmd.{context.name}.default.leaving.run")
    for _ in range(2):
        code, said = await (await command_line.begin("leaving:Leaving")).communicate()
        assert code == 1
        sentence = (
            f"a task or a callback that users' code left behind raised SystemExit ({tmp_path}/leaving.py, line 18)"
        )
        assert sentence in said.decode()
    process = await command_line.begin("leaving:Leaving")
    await settled(context, "leaving_consumer", f"{context.name}_COMMANDS".upper())
    process.terminate()
    _, said = await process.communicate()
    assert process.returncode == 0
    assert b'"reason":"max_deliver","error":"ack_timeout","event":"message_dead_lettered"' in said


FORKING = """
import asyncio, os, sys
from postroom.agent import Agent

class Forking(Agent):
    subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)

    async def receive(self, envelope):
        if envelope.id == "fork":
            child = os.fork()
            if child == 0:
                HOW
            else:
                print("forked and", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('no')", 1),
        ("raise ValueError('no')", 1),
        ("pass", 1),
        ("await Once()", 1),
    ],
)
async def test_a_process_that_an_agent_forks_is_no_second_agent(
    command_line: CommandLine, tmp_path: Path, how: str, code: int
):
    """It has the loop, the store and the connections of the first, which would neither get messages nor hear a stop."""
    once = "class Once:\n    def __await__(self):\n        yield\n"
    (tmp_path / "forking.py").write_text(FORKING.replace("HOW", how) + once)
    command_line.environment["PYTHONPATH"] = str(tmp_path)
    context = command_line.context
    process = await command_line.begin("forking:Forking")
    await context.publish(["before", "fork", "after"], b"{}", f"cmd.{context.name}.default.forking.run")
    await settled(context, "forking_consumer", f"{context.name}_COMMANDS".upper())
    await context.publish(["later"], b"{}", f"cmd.{context.name}.default.forking.run")
    await settled(context, "forking_consumer", f"{context.name}_COMMANDS".upper())
    process.terminate()
    _, said = await process.communicate()
    assert (process.returncode, f"forked and {code}\n" in said.decode()) == (0, True), said.decode()
    assert b"agent_failed" not in said


@pytest.mark.parametrize(
    ("agent", "code", "sentence"),
    [
        ("counting_agent", 2, "pass module:Agent"),
        ("no_such_module:Agent", 78, "cannot import no_such_module"),
        ("counting_agent:Nobody", 78, "there is no Nobody in counting_agent"),
        ("counting_agent:Envelope", 78, "is not an agent"),
    ],
)
async def test_an_agent_that_cannot_be_found_is_said_so(
    command_line: CommandLine, agent: str, code: int, sentence: str
):
    ended = await command_line.run("run", agent)
    assert ended.code == code
    assert sentence in ended.said


async def test_the_config_may_name_the_agent(command_line: CommandLine):
    assert "no agent is named" in (await command_line.run("verify")).said
    command_line.environment["POSTROOM_AGENT_AGENT_CLASS"] = AGENT
    ended = await command_line.run("verify")
    assert (ended.code, ended.said.strip()) == (3, f"postroom: there is no event store {command_line.database}")


async def test_a_subject_that_no_stream_keeps_is_said_so(command_line: CommandLine):
    await command_line.context.remove()
    command_line.environment["POSTROOM_AGENT_START_SECONDS"] = "2"
    ended = await command_line.run("run", AGENT)
    assert ended.code == 75
    assert "no stream has cmd." in ended.said
