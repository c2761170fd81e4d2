"""`postroom agent …`: run an agent, look at what its event store holds, publish it again by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.noun import Config, DryRun, Json, Reason, Since, Yes, noun
from cli.output import confirm, fields, json_line, line, reason_or_ask
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom.delivery.agents.replay import Verified

app = noun("Run agents, and inspect their event stores.")

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
        "--tenant", help="The mesh that it works in [default: from the config or POSTROOM_MESH].", metavar="SLUG"
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
    from cli.worker_process import become_worker, options  # noqa: PLC0415

    words = options(config=config, tenant=tenant, workspace=workspace)
    become_worker("agent", *words, *([] if agent is None else ["--", agent]))


@app.command()
def replay(
    *,
    agent: Name = None,
    config: Config = None,
    tenant: Tenant = None,
    workspace: Workspace = None,
    state_directory: State = None,
    as_json: Json = False,
) -> None:
    """Build an agent's state from its store and show it; nothing is handled and nothing is published."""
    from cli.worker_process import ask_worker  # noqa: PLC0415

    named, database = _stored(agent, config, tenant, workspace, state_directory)
    found = ask_worker("replay", "--", named, str(database))
    shown = found.pop("shown")
    json_line(found) if as_json else fields({**found, "state": shown}.items())


@app.command()
def verify(
    *,
    agent: Name = None,
    config: Config = None,
    tenant: Tenant = None,
    workspace: Workspace = None,
    state_directory: State = None,
    expected: Annotated[str | None, typer.Option("--hash", help="The expected state hash.", metavar="HEX")] = None,
    as_json: Json = False,
) -> None:
    """Recompute a store's state hash; exit code 1, and the first position that differs, if it is not the stored one."""
    from postroom.delivery.agents.replay import verify as verify_store  # noqa: PLC0415

    _, database = _stored(agent, config, tenant, workspace, state_directory)
    verified = asyncio.run(verify_store(database))
    _show(verified, as_json=as_json)
    if verified.first_difference is not None:
        raise Fatal(Exit.FAILED, f"{database} was altered at {verified.why}")
    if expected is not None and expected.lower() != verified.head.state_hash.hex():
        raise Fatal(Exit.FAILED, f"{database} is sound, but its state hash is not {expected}")


@app.command()
def republish(
    *,
    agent: Name = None,
    since: Since,
    config: Config = None,
    tenant: Tenant = None,
    workspace: Workspace = None,
    state_directory: State = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Publish again what an agent published since a time; a running agent does it at once, others at their start."""
    from postroom.delivery.agents.replay import republish as republish_since  # noqa: PLC0415

    why = reason_or_ask(reason, dry_run=dry_run)
    _, database = _stored(agent, config, tenant, workspace, state_directory)
    if not dry_run:
        confirm(f"Publish again what was published since {since:%Y-%m-%d %H:%M:%S}Z?", yes=yes)
    messages = asyncio.run(republish_since(database, since, reason=why, dry_run=dry_run))
    if as_json:
        json_line({"messages": messages})
    else:
        line(f"{messages} {'would be' if dry_run else 'are'} published again")


def _show(verified: Verified, *, as_json: bool) -> None:
    found = {
        **verified.owner._asdict(),
        "position": verified.head.position,
        "state_hash": verified.head.state_hash.hex(),
        "first_difference": verified.first_difference,
    }
    json_line(found) if as_json else fields(found.items())
    if verified.first_difference is None and not as_json:
        line("ok")


def _stored(
    agent: str | None, config: Path | None, tenant: str | None, workspace: str | None, directory: Path | None
) -> tuple[str, Path]:
    """Return an agent and where its store lies; without a config where both are given."""
    from cli.worker_process import ask_worker  # noqa: PLC0415
    from postroom.delivery.agents.runtime import database  # noqa: PLC0415
    from postroom.worker.config import load_agent_config, state_directory  # noqa: PLC0415

    if agent is not None and directory is not None:
        ask_worker("describe", "agent", "--", agent)
        return agent, database(directory)
    loaded = load_agent_config(config, tenant=tenant, workspace=workspace)
    named = loaded.name_agent(agent)
    name = ask_worker("describe", "agent", "--", named)["name"]
    return named, database(directory or state_directory(loaded, name))
