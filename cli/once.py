"""`postroom once …`: the keys of an idempotency registry (`postroom.once`), for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cli.noun import Json, Reason, Yes, noun
from cli.output import confirm, fields, json_line, line, note, reason_or_ask, table
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import this_user

if TYPE_CHECKING:
    from postroom.errors import NotFound
    from postroom.once import Scope, Store
    from postroom.once.model import KeptKey, Row

T = TypeVar("T")

app = noun("List, inspect and delete keys of things done once.")

Registry = Annotated[
    str | None,
    typer.Option(
        "--registry",
        envvar=["POSTROOM_ONCE_REGISTRY", "POSTROOM_DATABASE_URL"],
        help="The registry: postgresql://… or sqlite:///absolute/path.",
        metavar="URL",
    ),
]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The key, as `postroom once list` shows it.")]
Tenant = Annotated[str, typer.Option("--tenant", metavar="NAME", help="The tenant, often a mesh.")]
Topic = Annotated[str, typer.Option("--topic", metavar="NAME", help="The topic, often an event's name.")]
Group = Annotated[
    str | None, typer.Option("--group", metavar="NAME", help="The group of consumers [default: the producer's scope].")
]


@app.command("list")
def list_(
    *,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this tenant.")] = None,
    topic: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this topic.")] = None,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this group; '' is the producer's.")] = None,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="Only those that are PENDING, COMMITTED or FAILED.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many keys to show.")] = 50,
    registry: Registry = None,
    as_json: Json = False,
) -> None:
    """List keys, latest first by the end of the key or of its lease.

    \b
        postroom once list --state FAILED
        postroom once list --tenant shop --topic order_paid --group billing --json
    """  # noqa: D301 - \b: as it stands
    import msgspec  # noqa: PLC0415

    from postroom.once.model import KeyFilter, State  # noqa: PLC0415

    try:
        wanted = KeyFilter(tenant, topic, group, msgspec.convert(state and state.upper(), State | None))
    except msgspec.ValidationError as error:
        raise typer.BadParameter(
            f"{state!r} is not a state: PENDING, COMMITTED or FAILED", param_hint="--state"
        ) from error
    found = _with_store(registry, lambda store: store.find(wanted, limit + 1))
    if as_json:
        for each in found[:limit]:
            json_line(_members(each))
    elif found:
        table(
            ("STATE", "TENANT", "TOPIC", "GROUP", "KEY", "ATTEMPTS", "SINCE", "ERROR"),
            (
                (kept.state, scope.tenant, scope.topic, scope.group, scope.key, kept.attempts, since, kept.last_error)
                for kept in found[:limit]
                for scope, since in [(kept.scope, kept.settled_at or kept.begun_at)]
            ),
        )
    else:
        line("no keys")
    if len(found) > limit:
        note(f"There are more keys: --limit {2 * limit}")


@app.command()
def inspect(
    *, key: Key, tenant: Tenant, topic: Topic, group: Group = None, registry: Registry = None, as_json: Json = False
) -> None:
    """Show a key with its result, and whether operators deleted it before.

    \b
        postroom once inspect 01a1fc82-ab5c-0689-9154-33ba9c88d7e4 --tenant shop --topic order_paid --group billing
    """  # noqa: D301 - \b: as it stands
    scope = _scope(key, tenant, topic, group)

    async def look(store: Store) -> tuple[Row | None, list[Any]]:
        return await store.look(scope), await store.forgotten(scope)

    row, log = _with_store(registry, look)
    if row is None and not log:
        raise _missing(scope)
    told = {"tenant": tenant, "topic": topic, "group": group, "key": key, **_told(row)}
    if as_json:
        json_line({**told, "log": [{"verb": "forget", **act._asdict()} for act in log]})
        return
    fields(told.items())
    if log:
        line("")
        table(
            ("AT", "VERB", "BY", "WAS", "ATTEMPTS", "REASON"),
            ((act.at, "forget", act.actor, act.state, act.attempts, act.reason) for act in log),
        )


@app.command()
def forget(
    *,
    key: Key,
    tenant: Tenant,
    topic: Topic,
    group: Group = None,
    reason: Reason = None,
    yes: Yes = False,
    registry: Registry = None,
    as_json: Json = False,
) -> None:
    """Delete a key, so that its work can be done again: the next delivery of its message does it.

    \b
        postroom once forget 01a1fc82-ab5c-0689-9154-33ba9c88d7e4 --tenant shop --topic order_paid --group billing \\
            --reason "the card was never charged"
    """  # noqa: D301 - \b: as it stands
    from postroom.errors import Conflict  # noqa: PLC0415

    scope = _scope(key, tenant, topic, group)
    why = reason_or_ask(reason)
    confirm(f"Forget {scope}? Its work can then be done a second time.", yes=yes)

    async def work(store: Store) -> None:
        if await store.forget(scope, this_user(), why):
            return
        row = await store.look(scope)
        if row is None:
            raise _missing(scope)
        detail = (
            f"{scope} is held by {row.owner.rpartition('/')[0]} until {row.lease_until:%Y-%m-%dT%H:%M:%SZ}: forget it "
            "once that has ended, or stop the worker and wait for the end of its lease"
        )
        raise Conflict.of("key_held", detail)

    _with_store(registry, work)
    json_line({"key": key, "done": "forget"}) if as_json else line(f"{scope} is forgotten")


def _scope(key: str, tenant: str, topic: str, group: str | None) -> Scope:
    from postroom.once import Scope  # noqa: PLC0415

    if not key:
        raise Fatal(Exit.USAGE, "name a key (`postroom once list` shows them): an empty one is never kept")
    return Scope(tenant, topic, key, group)


def _missing(scope: Scope) -> NotFound:
    from postroom.errors import NotFound  # noqa: PLC0415

    detail = f"there is no {str(scope).removeprefix('the ')}: `postroom once list` lists them"
    return NotFound.of("key_missing", detail)


def _members(kept: KeptKey) -> dict[str, Any]:
    scope = kept.scope
    members = kept._asdict() | {"tenant": scope.tenant, "topic": scope.topic, "group": scope.group, "key": scope.key}
    del members["scope"]
    return members


def _told(row: Row | None) -> dict[str, Any]:
    if row is None:
        return {"state": None}
    result = None
    if row.result is not None:
        result = row.result.data.decode("utf-8", "backslashreplace")
    return {
        "state": row.state,
        "owner": row.owner,
        "attempts": row.attempts,
        "lease_until": row.lease_until,
        "last_error": row.last_error,
        "result": result,
        "encoding": row.result and row.result.encoding,
    }


def _with_store(url: str | None, work: Callable[[Store], Awaitable[T]]) -> T:
    from postroom.once.registry import open_store  # noqa: PLC0415

    if url is None:
        raise Fatal(Exit.USAGE, "no registry is configured: set POSTROOM_DATABASE_URL, or --registry")

    async def run() -> T:
        store = await open_store(url, create=False)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())
