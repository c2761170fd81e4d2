"""`postroom agent …`: run an agent, look at what its event store holds, publish it again by hand."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from cli import completion
from cli.change import Change
from cli.noun import Config, Json, Since, noun
from cli.output import confirm, fields, json_line, line, reason_or_ask
from cli.trace import show_story
from cli.worker import ask_worker, become_worker, options
from postroom._wire.operations import Recent
from postroom._wire.words import counted, when
from postroom.chassis.exits import Exit, Fatal

app = noun()

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:AGENT",
        help="The agent's class, as in shop.agents:Pricing [default: agent_class of the config].",
    ),
]
Tenant = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        help="The mesh that it works in [default: from the config or POSTROOM_MESH].",
        metavar="SLUG",
        autocompletion=completion.meshes,
    ),
]
Workspace = Annotated[str | None, typer.Option("--workspace", help="Its workspace there [default: default].")]
State = Annotated[
    Path | None,
    typer.Option(
        "--state-directory", help="The directory of its events.db [default: from the config].", metavar="DIRECTORY"
    ),
]


@app.command()
def run(*, agent: Name = None, config: Config = None, tenant: Tenant = None, workspace: Workspace = None) -> None:
    """Handle messages until a signal says stop. Processes of one agent on one host share its store and its work."""
    words = options(config=config, tenant=tenant, workspace=workspace)
    become_worker("agent", *words, *([] if agent is None else ["--", agent]))


class Stored(NamedTuple):
    """Which agent, and where its store lies."""

    agent: Name = None
    config: Config = None
    tenant: Tenant = None
    workspace: Workspace = None
    state_directory: State = None

    def find(self) -> tuple[str, Path]:
        """Return the agent and its store; without a config where both are given."""
        from postroom.delivery.agents import database  # noqa: PLC0415
        from postroom.worker.config import load_agent_config, state_directory  # noqa: PLC0415

        if self.agent is not None and self.state_directory is not None:
            ask_worker("describe", "agent", "--", self.agent)
            return self.agent, database(self.state_directory)
        loaded = load_agent_config(self.config, tenant=self.tenant, workspace=self.workspace)
        named = loaded.name_agent(self.agent)
        name = ask_worker("describe", "agent", "--", named)["name"]
        return named, database(self.state_directory or state_directory(loaded, name))


@app.command()
def replay(*, stored: Stored, as_json: Json = False) -> None:
    """Build an agent's state from its store and show it; nothing is handled and nothing is published."""
    named, database = stored.find()
    found = ask_worker("replay", "--", named, str(database))
    shown = found.pop("shown")
    json_line(found) if as_json else fields({**found, "state": shown}.items())


@app.command()
def verify(
    *,
    stored: Stored,
    expected: Annotated[str | None, typer.Option("--hash", help="The expected state hash.", metavar="HEX")] = None,
    as_json: Json = False,
) -> None:
    """Recompute a store's state hash; exit code 1, and the first position that differs, if it is not the stored one."""
    from postroom.delivery.agents.replay import verify as verify_store  # noqa: PLC0415

    _, database = stored.find()
    verified = asyncio.run(verify_store(database))
    altered, state_hash = verified.first_difference, verified.head.state_hash.hex()
    found = {
        **verified.owner._asdict(),
        "position": verified.head.position,
        "state_hash": state_hash,
        "first_difference": altered,
    }
    json_line(found) if as_json else fields(found.items())
    if altered is not None:
        raise Fatal(Exit.FAILED, f"{database} was altered at {verified.why}: put a copy from before in its place")
    if expected is not None and expected.lower() != state_hash:
        raise Fatal(
            Exit.FAILED, f"{database} is sound, but its state hash is not {expected}: check which store that hash is of"
        )
    if not as_json:
        line("ok")


@app.command()
def trace(
    *,
    message: Annotated[str, typer.Option(metavar="ID", help="The id of a message that it took, or that it emitted.")],
    stored: Stored,
    as_json: Json = False,
) -> None:
    """Tell what an agent did with a message, and what it emitted, also what is not published yet."""
    from postroom.delivery.agents.replay import trace as trace_message  # noqa: PLC0415

    _, database = stored.find()
    story = asyncio.run(trace_message(database, message))
    json_line(story) if as_json else show_story(story, [step.id for step in story.steps])


@app.command(without=("everything",))
def republish(*, since: Since, stored: Stored, change: Change) -> None:
    """Publish again what an agent published since a time; a running agent does it at once, others at their start."""
    from postroom.chassis import logs  # noqa: PLC0415
    from postroom.delivery.agents.replay import republish as republish_since  # noqa: PLC0415

    logs.configure()  # what the store logs belongs on standard error
    why = reason_or_ask(change.reason, dry_run=change.dry_run)
    _, database = stored.find()
    begin = Recent(**since).earliest(datetime.now(UTC))
    if not change.dry_run:
        confirm(f"Publish again what was published since {when(begin)}?", yes=change.yes)
    messages = asyncio.run(republish_since(database, begin, reason=why, dry_run=change.dry_run))
    if change.as_json:
        json_line({"messages": messages})
    else:
        line(f"{counted(messages, 'message')} {'would be ' * change.dry_run}published again")
