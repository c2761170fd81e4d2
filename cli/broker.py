"""`postroom broker …`: run the accept service, and look after its database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

from cli.connect import with_broker
from cli.noun import Config, Json, TokenFile, Url, noun
from cli.output import fields, json_line
from postroom._wire.words import counted
from postroom.chassis.exits import Exit

app = noun("Run and check the broker.")


@app.command()
def run(*, config: Config = None) -> None:
    """Serve until a signal says stop."""
    _command("run", config)


@app.command()
def migrate(*, config: Config = None) -> None:
    """Bring the database to this program's version."""
    _command("migrate", config)


@app.command()
def restored(*, config: Config = None) -> None:
    """Mark the database as restored from a backup: daemons then find what it lacks, readers where to resume."""
    _command("restored", config)


@app.command()
def orphan_check(*, config: Config = None, as_json: Json = False) -> None:
    """Check that every accepted message has all its rows; exit code 1 if one has not."""
    if not as_json:
        _command("orphan-check", config)
    from broker.commands import find_orphans  # noqa: PLC0415
    from broker.config import events_kept, load_config  # noqa: PLC0415

    settings = load_config(config)
    violations = asyncio.run(find_orphans(settings.database_url, events_kept=events_kept(settings.retention)))
    for violation in violations:
        json_line(violation._asdict())
    if violations:
        raise SystemExit(Exit.FAILED)


@app.command()
def features(*, as_json: Json = False, url: Url = None, token_file: TokenFile = None) -> None:
    """Show what a running broker supports, and the member that the token belongs to."""
    answer = with_broker(url, token_file, lambda client: client.features())
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


def _command(name: str, config: Path | None) -> NoReturn:
    from broker.commands import main  # noqa: PLC0415

    raise SystemExit(main(name, config))
