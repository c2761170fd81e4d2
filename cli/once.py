"""`postroom once …`: the keys of an idempotency registry (`postroom.once`), for operators.

The broker is asked for those in its database. A registry of a program's own, as in an SQLite file, has no server: with
`--registry` this process opens it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_args

import msgspec
import typer

from cli.connect import with_broker
from cli.noun import Json, Reason, TokenFile, Url, Yes, noun
from cli.output import confirm, fields, json_line, line, listing, note, reason_or_ask, table
from postroom._wire.administration import MAX_PAGE
from postroom._wire.once import (
    KEYS,
    KeyDetails,
    KeyName,
    KeyNames,
    KeysQuery,
    KeyState,
    key_held,
    key_missing,
)
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import this_user
from postroom.errors import error_for

if TYPE_CHECKING:
    from postroom.claims.model import Row
    from postroom.once import Scope, Store

T = TypeVar("T")

app = noun("List, inspect and delete keys of things done once.")

Registry = Annotated[
    str | None,
    typer.Option(
        "--registry",
        envvar="POSTROOM_ONCE_REGISTRY",
        help="A registry of a program's own, as sqlite:///absolute/path [default: that of the broker's database].",
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
    limit: Annotated[int, typer.Option(min=1, max=MAX_PAGE, help="How many keys to show.")] = 50,
    registry: Registry = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """List keys, latest first by the end of the key or of its lease.

    \b
        postroom once list --state FAILED
        postroom once list --tenant shop --topic order_paid --group billing --json
    """  # noqa: D301 - \b: as it stands
    if state is not None and (state := state.upper()) not in get_args(KeyState):
        raise typer.BadParameter(f"{state!r} is not a state: PENDING, COMMITTED or FAILED", param_hint="--state")
    query = KeysQuery(tenant=tenant, topic=topic, group=group, state=cast("KeyState | None", state), limit=limit + 1)
    if registry is None:
        found = with_broker(url, token_file, lambda client: client.list_things(KEYS, query)).keys
    else:
        found = _with_store(registry, lambda store: store.find(query))
    if found or as_json:
        listing(
            found[:limit],
            ("STATE", "TENANT", "TOPIC", "GROUP", "KEY", "ATTEMPTS", "SINCE", "ERROR"),
            lambda one: (
                one.state,
                one.tenant,
                one.topic,
                one.group,
                one.key,
                one.attempts,
                one.settled_at or one.begun_at,
                one.last_error,
            ),
            as_json=as_json,
        )
    else:
        line("no keys")
    if len(found) > limit:
        note(f"There are more keys: --limit {min(2 * limit, MAX_PAGE)}")


@app.command()
def inspect(
    *,
    key: Key,
    tenant: Tenant,
    topic: Topic,
    group: Group = None,
    registry: Registry = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show a key with its result, and whether operators deleted it before.

    \b
        postroom once inspect 01a1fc82-ab5c-0689-9154-33ba9c88d7e4 --tenant shop --topic order_paid --group billing
    """  # noqa: D301 - \b: as it stands
    name = _name(key, tenant, topic, group)
    if registry is None:
        found = with_broker(url, token_file, lambda client: client.inspect(KEYS, query=name))
    else:
        found = _with_store(registry, lambda store: _whole(store, name))
    if as_json:
        json_line(found)
        return
    shown = msgspec.structs.asdict(found)
    del shown["log"]
    fields(shown.items())
    if found.log:
        line("")
        table(
            ("AT", "VERB", "BY", "WAS", "ATTEMPTS", "REASON"),
            ((act.at, act.verb, act.actor, act.state, act.attempts, act.reason) for act in found.log),
        )


@app.command(
    help=f"""{KEYS.verbs["forget"].effect}

    \b
        postroom once forget 01a1fc82-ab5c-0689-9154-33ba9c88d7e4 --tenant shop --topic order_paid --group billing \\
            --reason "the card was never charged"
    """
)
def forget(
    *,
    key: Key,
    tenant: Tenant,
    topic: Topic,
    group: Group = None,
    reason: Reason = None,
    yes: Yes = False,
    registry: Registry = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Have the key deleted, after a question."""
    name = _name(key, tenant, topic, group)
    why = reason_or_ask(reason)
    what = f"the key {key[:64]!r} of {tenant}/{topic}" + ("" if group is None else f" for the group {group}")
    confirm(f"Forget {what}? Its work can then be done a second time.", yes=yes)
    if registry is None:
        meant = KeyNames(keys=[name])
        result = with_broker(url, token_file, lambda client: client.change(KEYS, "forget", meant, reason=why))
        if result.failed:
            raise error_for(result.failed[0].problem)
    else:
        _with_store(registry, lambda store: _forget(store, name, why))
    json_line({"key": key, "done": "forget"}) if as_json else line(f"{what} {KEYS.verbs['forget'].done}")


def _name(key: str, tenant: str, topic: str, group: str | None) -> KeyName:
    if not key:
        raise Fatal(Exit.USAGE, "name a key (`postroom once list` shows them): an empty one is never kept")
    return KeyName(tenant=tenant, topic=topic, key=key, group=group)


async def _look_up(store: Store, scope: Scope) -> Row | None:
    return (await store.look_up([scope.columns])).get(scope.columns)


async def _whole(store: Store, name: KeyName) -> KeyDetails:
    from postroom.once.model import state_of  # noqa: PLC0415

    scope = _scope(name)
    row, log = await _look_up(store, scope), await store.forgotten(scope)
    if row is None and not log:
        raise key_missing(str(scope))
    known: dict[str, Any] = {}
    if row is not None:
        known = {member: getattr(row, member) for member in ("owner", "attempts", "lease_until", "last_error")}
        known["state"] = state_of(row)
        if row.result is not None:
            known |= {"encoding": row.result.encoding, "result": row.result.data.decode("utf-8", "backslashreplace")}
    return KeyDetails(**vars(scope), **known, log=log)


async def _forget(store: Store, name: KeyName, why: str) -> None:
    scope = _scope(name)
    if await store.forget(scope, this_user(), why):
        return
    row = await _look_up(store, scope)
    if row is None or row.owner is None:
        raise key_missing(str(scope))
    raise key_held(str(scope), row.owner, row.lease_until)


def _scope(name: KeyName) -> Scope:
    from postroom.once import Scope  # noqa: PLC0415

    return Scope(name.tenant, name.topic, name.key, name.group)


def _with_store(url: str, work: Callable[[Store], Awaitable[T]]) -> T:
    from postroom.once.registry import open_store  # noqa: PLC0415

    async def run() -> T:
        store = await open_store(url, create=False)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())
