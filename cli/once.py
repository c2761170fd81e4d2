"""`postroom once …`: the keys of an idempotency registry (`postroom.once`), for operators.

The broker is asked for those in its database. A registry of a program's own, as in an SQLite file, has no server: with
`--registry` this process opens it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args

import msgspec
import typer

from cli.noun import BrokerPlace, Json, Reason, Yes, choice, noun
from cli.output import confirm, fields, json_line, line, listing, note, reason_or_ask, table
from postroom import BrokerClient
from postroom._wire import once as api
from postroom._wire.administration import MAX_PAGE
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import this_user
from postroom.claims import Row
from postroom.errors import error_for
from postroom.once.model import Scope, Store, state_of
from postroom.once.registry import open_store

T = TypeVar("T")

app = noun()

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


class OwnRegistry:
    """A registry that no server owns, open in this process: asked as the broker is asked for its own."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def list(self, query: api.KeysQuery) -> api.KeyPage:
        """Return the keys that `query` means."""
        return api.KeyPage(keys=await self._store.find(query))

    async def inspect(self, scope: Scope) -> api.KeyDetails:
        """Return a key whole; raises `NotFound` for one that neither is there nor was."""
        row, log = await self._look_up(scope), await self._store.forgotten(scope)
        if row is None and not log:
            raise api.key_missing(str(scope))
        known: dict[str, Any] = {}
        if row is not None:
            known = {member: getattr(row, member) for member in ("owner", "attempts", "lease_until", "last_error")}
            known["state"] = state_of(row)
            if row.result is not None:
                data = row.result.data.decode("utf-8", "backslashreplace")
                known |= {"encoding": row.result.encoding, "result": data}
        return api.KeyDetails(**vars(scope), **known, log=log)

    async def forget(self, scope: Scope, why: str) -> None:
        """Delete a key; raises `NotFound`, and `Conflict` while it is held."""
        if await self._store.forget(scope, this_user(), why):
            return
        row = await self._look_up(scope)
        if row is None or row.owner is None:
            raise api.key_missing(str(scope))
        raise api.key_held(str(scope), row.owner, row.lease_until)

    async def _look_up(self, scope: Scope) -> Row | None:
        return (await self._store.look_up([scope.columns])).get(scope.columns)


class Place(NamedTuple):
    """Which registry to ask."""

    registry: Registry = None
    broker: BrokerPlace = BrokerPlace()

    def ask(self, broker: Callable[[BrokerClient], Awaitable[T]], own: Callable[[OwnRegistry], Awaitable[T]]) -> T:
        """Ask the broker for the one in its database, or the registry itself if one is named."""
        if (url := self.registry) is None:
            return self.broker.ask(broker)

        async def run() -> T:
            store = await open_store(url, create=False)
            try:
                return await own(OwnRegistry(store))
            finally:
                await store.close()

        return asyncio.run(run())


class Named(NamedTuple):
    """The parts that name a key."""

    key: Key
    tenant: Tenant
    topic: Topic
    group: Group = None

    def wire(self) -> api.KeyName:
        """Return it as requests name it; raises `Fatal` for an empty one."""
        if not self.key:
            raise Fatal(Exit.USAGE, "name a key (`postroom once list` shows them): an empty one is never kept")
        return api.KeyName(**self._asdict())

    def scope(self) -> Scope:
        """Return it as a registry names it."""
        return Scope(**self._asdict())


@app.command("list")
def list_(
    *,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this tenant.")] = None,
    topic: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this topic.")] = None,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this group; '' is the producer's.")] = None,
    state: Annotated[
        str | None,
        typer.Option(
            **choice("state", get_args(api.KeyState)),
            metavar="STATE",
            help="Only those that are PENDING, COMMITTED or FAILED.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_PAGE, help="How many keys to show.")] = 50,
    place: Place,
    as_json: Json = False,
) -> None:
    """List keys, latest first by the end of the key or of its lease.

    \b
        postroom once list --state FAILED
        postroom once list --tenant shop --topic order_paid --group billing --json
    """  # noqa: D301 - \b: as it stands
    query = api.KeysQuery(
        tenant=tenant, topic=topic, group=group, state=cast("api.KeyState | None", state), limit=limit + 1
    )

    def cells(one: api.KeptKey) -> tuple[Any, ...]:
        since = one.settled_at or one.begun_at
        return (one.state, one.tenant, one.topic, one.group, one.key, one.attempts, since, one.last_error)

    found = place.ask(lambda client: client.list_things(api.KEYS, query), lambda own: own.list(query)).keys
    columns = ("STATE", "TENANT", "TOPIC", "GROUP", "KEY", "ATTEMPTS", "SINCE", "ERROR")
    listing(found[:limit], columns, cells, things="keys", as_json=as_json)
    if len(found) > limit:
        note(f"There are more keys: --limit {min(2 * limit, MAX_PAGE)}")


@app.command()
def inspect(*, named: Named, place: Place, as_json: Json = False) -> None:
    """Show a key with its result, and whether operators deleted it before.

    \b
        postroom once inspect 01a1fc82-ab5c-0689-9154-33ba9c88d7e4 --tenant shop --topic order_paid --group billing
    """  # noqa: D301 - \b: as it stands
    name = named.wire()
    found = place.ask(lambda client: client.inspect(api.KEYS, query=name), lambda own: own.inspect(named.scope()))
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
    help=f"""{api.KEYS.verbs["forget"].effect}

    \b
        postroom once forget 01a1fc82-ab5c-0689-9154-33ba9c88d7e4 --tenant shop --topic order_paid --group billing \\
            --reason "the card was never charged"
    """
)
def forget(*, named: Named, reason: Reason = None, yes: Yes = False, place: Place, as_json: Json = False) -> None:
    """Have the key deleted, after a question."""
    name, whose = named.wire(), "" if named.group is None else f" for the group {named.group}"
    why = reason_or_ask(reason)
    what = f"the key {named.key[:64]!r} of {named.tenant}/{named.topic}{whose}"
    confirm(f"Forget {what}? Its work can then be done a second time.", yes=yes)

    async def forget_there(client: BrokerClient) -> None:
        result = await client.change(api.KEYS, "forget", api.KeyNames(keys=[name]), reason=why)
        if result.failed:
            raise error_for(result.failed[0].problem)

    place.ask(forget_there, lambda own: own.forget(named.scope(), why))
    json_line({"key": named.key, "done": "forget"}) if as_json else line(f"{what} {api.KEYS.verbs['forget'].done}")
