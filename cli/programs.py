"""`postroom daemon|relay|broker|console|pipeline …`: run our programs, check what they need, look after theirs.

A program is imported when it is run: what people type to ask a running one needs none of it.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli import completion
from cli.connect import TOKEN_FILES, with_daemon
from cli.noun import BrokerPlace, Config, Json, Reason, Socket, Url, noun, rate
from cli.output import fields, json_line, line, note, reason_or_ask, show_findings, table
from postroom._wire.words import counted
from postroom.chassis.exits import Exit, Fatal, Finding

if TYPE_CHECKING:
    from daemon.config import DaemonConfig


def _pipelines(incomplete: str) -> list[str]:
    from pipeline.runner import PIPELINES  # noqa: PLC0415

    return [name for name in PIPELINES if name.startswith(incomplete)]


AcceptLostIds = Annotated[
    bool, typer.Option("--accept-lost-ids", help="Start with an outbox that lost rows: their ids may be used again.")
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The pipeline; `postroom pipeline list` shows them.", autocompletion=_pipelines
    ),
]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="[OPTION=VALUE]...", help="Its options, as mesh=sea since=2026-11-01.")
]

To = Annotated[
    str | None,
    typer.Argument(
        metavar="[TO]", help="Only this destination [default: all].", autocompletion=completion.destinations
    ),
]

daemons = noun()
relays = noun()
brokers = noun()
consoles = noun()
pipelines = noun()


@daemons.command("run")
def run_daemon(*, config: Config = None, accept_lost_ids: AcceptLostIds = False) -> None:
    """Accept, keep and relay until a signal says stop."""
    from daemon.__main__ import run  # noqa: PLC0415

    raise SystemExit(run(daemon_config(config), accept_lost_ids=accept_lost_ids))


@daemons.command()
def rotate_token(*, config: Config = None) -> None:
    """Write a new local token for the TCP port; the old one is valid for another 60 s."""
    from daemon.config import token_file  # noqa: PLC0415
    from ipc.peers import rotate  # noqa: PLC0415

    file = token_file(daemon_config(config))
    rotate(file)
    line(f"the new token is in {file}")


@daemons.command()
def check(*, config: Config = None, as_json: Json = False) -> None:
    """Show the effective config with secrets masked, and try every server and file in it."""
    import asyncio  # noqa: PLC0415 - `postroom outbox` does without it

    from daemon.checks import check as find  # noqa: PLC0415
    from postroom.chassis.config import effective  # noqa: PLC0415

    loaded = daemon_config(config)
    settings = {".".join(setting.path): value for setting, value in effective(loaded)}

    async def collect() -> list[Finding]:
        return [finding async for finding in find(loaded)]

    if as_json:
        json_line({"config": settings})
    else:
        fields(settings.items())
        line("")
    show_findings(asyncio.run(collect()), as_json=as_json)


def daemon_config(file: Path | None) -> DaemonConfig:
    """Read the config; where none was named, and `postroom up` wrote one, the refusal says where that lies."""
    from cli.stack.layout import Layout  # noqa: PLC0415
    from daemon.config import load_config  # noqa: PLC0415

    try:
        return load_config(file)
    except Fatal as fatal:
        state = os.environ.get("POSTROOM_STATE")
        written = None if state is None else Layout(Path(state)).daemon_directory / "daemon.toml"
        if file is not None or written is None or not written.exists():
            raise
        raise Fatal(fatal.exit_code, f"{fatal}; that of `postroom up` is {written}") from fatal


@relays.command()
def pause(*, to: To = None, reason: Reason = None, as_json: Json = False, socket: Socket = None) -> None:
    """Pause the relay until it is resumed, across restarts too; sends are still accepted and kept."""
    why = reason_or_ask(reason)
    status = with_daemon(socket, lambda client: client.pause_relay(to, reason=why))
    json_line(status) if as_json else line(f"paused {_what(to)}, until `postroom relay resume`; sends are kept")


@relays.command()
def resume(
    *,
    to: To = None,
    per_second: Annotated[
        float | None, typer.Option("--rate", parser=rate, metavar="RATE", help="At most 50/s [default: no limit].")
    ] = None,
    reason: Reason = None,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Resume the relay."""
    why = reason_or_ask(reason)
    status = with_daemon(socket, lambda client: client.resume_relay(to, reason=why, rate_per_second=per_second))
    limit = f", at most {per_second:g}/s" if per_second is not None else ""
    still = ""
    if status.state == "paused":
        still = "; all relaying is still paused: `postroom relay resume`"
    elif status.paused_destinations:
        still = f"; still paused: {', '.join(status.paused_destinations)}"
    json_line(status) if as_json else line(f"resumed {_what(to)}{limit}{still}")


def _what(to: str | None) -> str:
    return f"relaying to {to}" if to is not None else "relaying"


def of_broker(command: str, *, config: Config = None) -> None:
    """Run a command of the broker's program."""
    from broker.__main__ import main  # noqa: PLC0415

    raise SystemExit(main(command, config))


_OF_BROKER: Final = {
    "run": "Serve until a signal says stop.",
    "migrate": "Bring the database to this program's version.",
    "restored": "Mark the database as restored from a backup: daemons then find what it lacks, readers where to "
    "resume.",
}
for _command, _effect in _OF_BROKER.items():
    brokers.command(_command, help=_effect)(partial(of_broker, _command))


@brokers.command()
def orphan_check(*, config: Config = None, as_json: Json = False) -> None:
    """Check that every accepted message has all its rows; exit code 1 if one has not."""
    if not as_json:
        of_broker("orphan-check", config=config)
    import asyncio  # noqa: PLC0415

    from broker.__main__ import find_orphans  # noqa: PLC0415
    from broker.config import events_kept, load_config  # noqa: PLC0415

    settings = load_config(config)
    violations = asyncio.run(find_orphans(settings.database_url, events_kept=events_kept(settings.retention)))
    for violation in violations:
        json_line(violation._asdict())
    if violations:
        raise SystemExit(Exit.FAILED)


@brokers.command()
def features(
    *,
    as_json: Json = False,
    url: Url = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar=[*reversed(TOKEN_FILES)],  # an administrator's has no features
            help="The file with the token of a member.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Show what a running broker supports, and the member that the token belongs to."""
    answer = BrokerPlace(url, token_file).ask(lambda client: client.features())
    if as_json:
        json_line(answer)
        return
    dedupe, payload, limit = answer.client_message_id_dedupe, answer.max_payload, answer.rate_limit
    days = dedupe and dedupe.dedupe_retention_days
    fields(
        (
            ("mesh", answer.mesh),
            ("member", answer.member),
            ("incarnation", answer.incarnation),
            ("largest batch", f"{answer.max_batch} messages"),
            ("ids are recognised", dedupe and (f"for {counted(days, 'day')}" if days else "forever")),
            ("largest body", payload and f"{payload.inline_bytes} bytes"),
            ("a mesh may send", limit and f"{counted(limit.per_mesh, 'message')} in {limit.window_seconds} s"),
            ("a member may send", limit and f"{counted(limit.per_member, 'message')} in {limit.window_seconds} s"),
        )
    )


@consoles.command()
def console(*, config: Config = None) -> None:
    """Serve a page for operators, who log in with their token, until a signal says stop.

    It asks the broker at `broker_url` of its config, or at POSTROOM_CONSOLE_BROKER_URL or POSTROOM_BROKER_URL.
    """
    from console.__main__ import main  # noqa: PLC0415

    raise SystemExit(main(config))


@pipelines.command("run")
def run_pipeline(*, name: Name, options: Words = None, as_json: Json = False) -> None:
    """Run one pipeline to its end and print a summary; exit code 1 if it found a violation."""
    from pipeline.runner import run_by_name  # noqa: PLC0415

    outcome = run_by_name(name, options or [], shown=not as_json)
    if as_json:
        json_line({"pipeline": name, "failed": outcome.failed, **outcome.facts})
    else:
        fields(outcome.facts.items())
        note(f"{name}: {'found what should not be' if outcome.failed else 'done'}")
    if outcome.failed:
        raise SystemExit(Exit.FAILED)


@pipelines.command("list")
def list_pipelines(*, as_json: Json = False) -> None:
    """List the pipelines and their options."""
    from pipeline.runner import PIPELINES, check_spark, described  # noqa: PLC0415

    check_spark()
    for pipeline in PIPELINES.values():
        options = described(pipeline.options)
        if as_json:
            json_line({"name": pipeline.name, "reads": pipeline.reads, "summary": pipeline.summary, "options": options})
            continue
        line(f"{pipeline.name}: {pipeline.summary}")
        table(
            ("  OPTION", "MEANING"),
            ((f"  {key}{'' if option['required'] else '='}", option["description"]) for key, option in options.items()),
        )
