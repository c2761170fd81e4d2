"""`postroom mesh|member|topic|queue|broker …`, against a real broker on a real Postgres and Redis."""

from __future__ import annotations

import asyncio
import resource
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.clocks import Ahead
from support.databases import create
from support.mailroom import Mailroom
from support.terminal import Outcome, Terminal
from support.zygote import shared

from broker_client import BrokerClientSettings, BrokerLink
from embedded import EmbeddedPostgres, EmbeddedRedis
from postroom import BrokerClient, Conflict, HistoryQuery, NotFound, NotPermitted
from postroom._wire.message import prepare


@pytest.fixture(scope="module")
def mailroom(
    session_directory: Path, postgres_server: EmbeddedPostgres, redis_server: EmbeddedRedis
) -> Iterator[Mailroom]:
    """One mail room for the whole module: each test uses names of its own."""
    directory = session_directory / "mailroom"
    directory.mkdir()
    with asyncio.Runner() as runner:
        runner.run(create(postgres_server, "administration"))
        room = Mailroom(directory, postgres_server.url_of("administration"), redis_server.url, zygote=shared())
        runner.run(room.open())
    yield room
    room.close()
    shutil.rmtree(directory)


class Administrator:
    """A user with the administrator's token; `as_member` has alice's."""

    def __init__(self, room: Mailroom) -> None:
        common = {"POSTROOM_BROKER_URL": room.broker_urls[0]}
        self.admin = Terminal(room.socket, POSTROOM_ADMIN_TOKEN_FILE=str(room.directory / "admin.token"), **common)
        self.member = Terminal(room.socket, POSTROOM_BROKER_TOKEN_FILE=str(room.directory / "alice.token"), **common)

    async def run(self, *arguments: str) -> Outcome:
        return await asyncio.to_thread(self.admin.run, *arguments)

    async def as_member(self, *arguments: str) -> Outcome:
        return await asyncio.to_thread(self.member.run, *arguments)


async def test_a_mesh_is_set_up_and_taken_down(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    token_file = mailroom.directory / "carol.token"
    assert (await user.run("mesh", "create", "plant")).code == 0
    made = await user.run("member", "create", "carol", "--mesh", "plant", "--token-out", str(token_file))
    assert made.code == 0
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert token_file.read_text().strip() not in made.out
    assert (await user.run("topic", "create", "orders", "--mesh", "plant")).code == 0
    assert (await user.run("queue", "create", "work.fast", "--mesh", "plant")).code == 0
    assert (await user.run("topic", "subscribe", "orders", "carol", "--mesh", "plant")).code == 0
    subscribers = await user.run("topic", "subscribers", "orders", "--mesh", "plant", "--json")
    assert [each["member"] for each in subscribers.json] == ["carol"]
    assert {each["slug"] for each in (await user.run("mesh", "list", "--json")).json} == {"demo", "plant"}
    assert [each["name"] for each in (await user.run("queue", "list", "--mesh", "plant", "--json")).json] == [
        "work.fast"
    ]
    for command in (
        ("topic", "unsubscribe", "orders", "carol", "--mesh", "plant"),
        ("topic", "delete", "orders", "--mesh", "plant", "--yes"),
        ("queue", "delete", "work.fast", "--mesh", "plant", "--yes"),
        ("member", "revoke", "carol", "--mesh", "plant", "--yes"),
        ("mesh", "delete", "plant", "--yes"),
    ):
        assert (await user.run(*command)).code == 0, command


async def test_an_operator_has_a_role_of_its_own_until_it_is_revoked(mailroom: Mailroom) -> None:
    user, token_file = Administrator(mailroom), mailroom.directory / "lea.token"
    made = await user.run("operator", "create", "lea", "--role", "LOOK", "--token-out", str(token_file))
    assert (made.code, made.out) == (0, f"the token of lea in every mesh is in {token_file}\n")
    as_lea = ("--token-file", str(token_file))
    assert (await user.run("mesh", "list", *as_lea)).code == 0
    for command in (("mesh", "create", "mine"), ("operator", "create", "mallory", "--role", "administer")):
        refused = await user.run(*command, *as_lea)
        assert (refused.code, "`postroom operator create NAME --role administer`" in refused.sentence()) == (77, True)
    assert "--mesh" in (await user.run("topic", "list", *as_lea)).sentence()
    rob = await user.run("operator", "create", "rob", "--role", "repair", "--mesh", "demo", "--json")
    assert (rob.json[0]["role"], rob.json[0]["mesh"]) == ("repair", "demo")
    token_file.write_text(rob.json[0]["token"])
    assert (await user.run("topic", "list", *as_lea)).code == 0
    rotated = await user.run("operator", "rotate-token", "rob", "--yes")
    assert (await user.run("topic", "list", *as_lea)).code == 77
    token_file.write_text(rotated.out)
    assert (await user.run("operator", "revoke", "rob", "--yes")).code == 0
    assert (await user.run("topic", "list", *as_lea)).code == 77
    listed = {one["name"]: one for one in (await user.run("operator", "list", "--json")).json}
    assert [(name, one["role"], "revoked_at" in one) for name, one in listed.items()] == [
        ("lea", "look", False),
        ("rob", "repair", True),
    ]
    assert "every mesh" in (await user.run("operator", "list")).out
    assert (await user.run("operator", "create", "zoe", "--role", "boss")).code == 2


async def test_one_log_says_what_was_done_at_the_broker_and_at_the_daemon(
    mailroom: Mailroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = Administrator(mailroom)
    await user.run("mesh", "create", "logged")
    await user.as_member("send", "topic:nowhere", "hello", "--id", "for-the-log", "--wait")
    aborted = await user.as_member("outbox", "abort", "for-the-log", "--reason", "nobody reads it", "--yes", "--json")
    await user.as_member("relay", "pause", "topic:none", "--reason", "a test")
    await user.run("mesh", "delete", "logged", "--yes")
    shown = (await user.run("log", "--limit", "4", "--json")).json
    row = aborted.json[0]["id"]
    assert [(one["where"], one["noun"], one["verb"], one["outcome"].partition(":")[0]) for one in shown] == [
        ("broker", "mesh", "delete", "done"),
        (str(mailroom.socket), "relay", "pause", "done"),
        (str(mailroom.socket), "row", "abort", "aborted"),
        ("broker", "mesh", "create", "done"),
    ]
    assert (shown[2]["key"], shown[2]["reason"]) == (row, "nobody reads it")
    assert shown[2]["actor"].startswith("uid ")

    async def keys(*filters: str) -> list[str]:
        return [one["key"] for one in (await user.run("log", *filters, "--json")).json]

    assert await keys("--noun", "row", "--key", row) == [row]
    assert await keys("--verb", "delete", "--key", "logged") == ["logged"]
    assert await keys("--actor", shown[2]["actor"], "--verb", "abort") == [row]
    with monkeypatch.context() as on_another_host:
        on_another_host.setattr("cli.noun.datetime", Ahead)
        assert {row, "logged"} <= set(await keys("--since", "1h"))
    assert await keys("--since", "0s") == []
    assert (await user.run("log", "--actor", "nobody")).out == "no lines match\n"
    first, second = await user.run("log", "--limit", "1"), await user.run("log", "--limit", "2", "--json")
    assert "there are older ones" in first.err
    assert len(second.json) == 2


async def test_a_log_without_one_of_its_parts_names_it_and_shows_the_rest(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    await user.run("mesh", "create", "halved")
    await user.as_member("relay", "pause", "topic:halved", "--reason", "a test")
    without_broker = await user.run("log", "--url", "http://127.0.0.1:9", "--json")
    assert without_broker.code == 69
    assert "the log of the broker is missing" in without_broker.sentence()
    assert {one["where"] for one in without_broker.json} == {str(mailroom.socket)}
    without_daemon = await user.run("log", "--socket", "/nonexistent/d.sock", "--json")
    assert without_daemon.code == 69
    assert "the log of the daemon is missing" in without_daemon.sentence()
    assert {one["where"] for one in without_daemon.json} == {"broker"}


async def test_lists_for_people_are_tables(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    for command, expected in {
        ("mesh", "list"): "demo",
        ("member", "list", "--mesh", "demo"): "alice",
        ("topic", "list", "--mesh", "demo"): "orders",
        ("topic", "subscribers", "orders", "--mesh", "demo"): "alice",
    }.items():
        shown = await user.run(*command)
        assert shown.code == 0
        assert any(expected in line.split() for line in shown.out.splitlines()[1:])


async def test_a_members_token_implies_its_mesh(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    assert "orders" in {each["name"] for each in (await user.as_member("topic", "list", "--json")).json}
    features = await user.as_member("broker", "features")
    assert "alice" in features.out
    assert (await user.as_member("broker", "features", "--json")).json[0]["mesh"] == "demo"
    user.member.environment["POSTROOM_ADMIN_TOKEN_FILE"] = user.admin.environment["POSTROOM_ADMIN_TOKEN_FILE"]
    assert (await user.as_member("broker", "features")).out == features.out  # as with the variables of `postroom up`
    asked = await user.run("topic", "list")
    assert asked.code == 2
    assert "--mesh" in asked.sentence()


async def test_a_member_may_not_administer(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    for command in (("mesh", "create", "mine"), ("topic", "create", "mine"), ("member", "create", "mallory")):
        refused = await user.as_member(*command)
        assert refused.code == 77
        assert refused.sentence()


async def test_the_daemons_own_member_subscribes_through_the_daemon(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    await user.run("topic", "create", "news", "--mesh", "demo")
    assert (await user.as_member("topic", "subscribe", "news")).code == 0
    shown = await user.run("topic", "subscribers", "news", "--mesh", "demo", "--json")
    assert [each["member"] for each in shown.json] == ["alice"]
    assert (await user.as_member("topic", "unsubscribe", "news")).code == 0
    assert (await user.as_member("topic", "subscribe", "nonsense")).code == 3


async def test_a_token_that_would_cross_the_network_unencrypted_is_warned_of(mailroom: Mailroom) -> None:
    local, token_file = mailroom.broker_urls[0], str(mailroom.directory / "admin.token")
    advice = "use https, or a way that is encrypted"
    warning = f"warning: others on the network can read the token that goes to {{}}: {advice}\n"
    port = local.rpartition(":")[2]
    for url, warns in ((local, False), (f"http://localhost:{port}", False), (f"http://0.0.0.0:{port}", True)):
        process = await asyncio.create_subprocess_exec(  # of its own, since a warning ends a test's
            *(sys.executable, "-m", "cli", "mesh", "list", "--json", "--url", url, "--token-file", token_file),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
        assert (process.returncode, said.decode()) == (0, warning.format(url) * warns)
    with pytest.warns(UserWarning, match="others on the network can read the token"):
        async with BrokerClient(f"http://0.0.0.0:{port}", "t" * 30, patience=0) as client:
            assert (await client.health()).status


async def test_what_exists_twice_or_not_at_all_is_said(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    assert (await user.run("mesh", "create", "demo")).code == 4
    assert (await user.run("topic", "create", "orders", "--mesh", "demo")).code == 4
    assert (await user.run("topic", "delete", "nonsense", "--mesh", "demo", "--yes")).code == 3
    assert (await user.run("mesh", "create", "Not A Slug")).code == 2


async def test_a_rotated_token_replaces_the_old_one(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    first = (await user.run("member", "create", "zoe", "--mesh", "demo")).out.strip()
    issued = await user.run("member", "rotate-token", "zoe", "--mesh", "demo", "--yes", "--json")
    async with BrokerClient(mailroom.broker_urls[0], issued.json[0]["token"], patience=0) as client:
        assert (await client.features()).member == "zoe"
    async with BrokerClient(mailroom.broker_urls[0], first, patience=0) as client:
        with pytest.raises(NotPermitted):
            await client.features()


async def test_a_token_is_replaced_with_an_overlap(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    tokens = [(await user.run("member", "create", "yara", "--mesh", "demo")).out.strip()]
    tokens.append((await user.run("member", "rotate-token", "yara", "--mesh", "demo", "--keep-old")).out.strip())
    again = await user.run("member", "rotate-token", "yara", "--mesh", "demo", "--keep-old")
    assert (again.code, "postroom member retire-token yara" in again.sentence()) == (4, True)

    async def valid() -> list[bool]:
        found = []
        for token in tokens:
            async with BrokerClient(mailroom.broker_urls[0], token, patience=0) as client:
                try:
                    found.append((await client.features()).member == "yara")
                except NotPermitted:
                    found.append(False)
        return found

    assert await valid() == [True, True]
    assert (await user.run("member", "retire-token", "yara", "--mesh", "demo", "--yes")).code == 0
    assert await valid() == [False, True]
    assert (await user.run("member", "retire-token", "yara", "--mesh", "demo", "--yes")).code == 3


@pytest.mark.parametrize(
    ("noun", "options"), [("member", ["--mesh", "demo"]), ("operator", ["--role", "look"])], ids=["member", "operator"]
)
async def test_a_creation_whose_token_was_lost_is_gone_on_with(
    noun: str, options: list[str], mailroom: Mailroom
) -> None:
    """One that was interrupted, or whose answer was, and that is typed again."""
    user, name = Administrator(mailroom), f"lost-{noun}"
    await user.run(noun, "create", name, *options)
    again = await user.run(noun, "create", name, *options)
    advice = f"if its token was lost, `postroom {noun} rotate-token {name}` issues another"
    assert (again.code, advice in again.sentence()) == (4, True)


@pytest.mark.parametrize(
    ("noun", "options"), [("member", ["--mesh", "demo"]), ("operator", ["--role", "look"])], ids=["member", "operator"]
)
async def test_a_name_that_was_revoked_is_said_to_be_one(noun: str, options: list[str], mailroom: Mailroom) -> None:
    """A revocation whose answer was lost, and that is typed again."""
    user, name = Administrator(mailroom), f"ended-{noun}"
    await user.run(noun, "create", name, *options)
    where = options if noun == "member" else []
    assert (await user.run(noun, "revoke", name, "--yes", *where)).code == 0
    for verb in "revoke", "rotate-token":
        again = await user.run(noun, verb, name, "--yes", *where)
        assert (again.code, "or it was revoked, which is permanent" in again.sentence()) == (3, True)


async def test_a_second_token_that_was_lost_is_not_the_one_that_stays(mailroom: Mailroom) -> None:
    """To retire the old one, which is in use, would leave a token that nobody knows."""
    user = Administrator(mailroom)
    await user.run("member", "create", "walt", "--mesh", "demo")
    await user.run("member", "rotate-token", "walt", "--mesh", "demo", "--keep-old")
    again = await user.run("member", "rotate-token", "walt", "--mesh", "demo", "--keep-old")
    assert "if the new one was lost, `postroom member rotate-token walt` replaces both" in again.sentence()


async def test_no_token_is_issued_where_it_could_not_be_kept(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    user.admin.environment["PYTHONDONTWRITEBYTECODE"] = "1"  # whose files would be cut off too
    taken, full = mailroom.directory / "admin.token", mailroom.directory / "full"
    full.mkdir()
    wrong = {taken: "it exists", full / "dave.token": "File too large", full / "no" / "dave.token": "No such file"}
    for file, why in wrong.items():
        refused = await asyncio.to_thread(
            user.admin.process,
            *("member", "create", "dave", "--mesh", "demo", "--token-out", file),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (32, 32)),
        )
        assert (refused.code, refused.sentence().startswith(f"cannot write {file}: {why}")) == (74, True)
    assert taken.read_text() == mailroom.admin_token
    assert list(full.iterdir()) == []
    names = [each["name"] for each in (await user.run("member", "list", "--mesh", "demo", "--json")).json]
    assert "dave" not in names


async def test_a_webhook_is_added_listed_and_removed_and_its_secret_stands_alone(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    await user.run("topic", "create", "hooked", "--mesh", "demo")
    verb = ("topic", "webhook")
    added = await user.run(*verb, "add", "hooked", "https://93.184.216.34/hook", "--mesh", "demo")
    assert (added.code, added.out.startswith("whsec_"), len(added.out.split())) == (0, True, 1)
    listed = await user.run(*verb, "list", "hooked", "--mesh", "demo", "--json")
    assert [each["url"] for each in listed.json] == ["https://93.184.216.34/hook"]
    assert "secret" not in listed.out
    shown = await user.run(*verb, "list", "hooked", "--mesh", "demo")
    assert listed.json[0]["id"] in shown.out
    assert (await user.run(*verb, "remove", "hooked", listed.json[0]["id"], "--mesh", "demo", "--yes")).code == 0
    assert (await user.run(*verb, "remove", "hooked", listed.json[0]["id"], "--mesh", "demo", "--yes")).code == 3
    refused = await user.run(*verb, "add", "hooked", "http://10.0.0.1/", "--mesh", "demo")
    assert (refused.code, "private address" in refused.sentence()) == (2, True)


@pytest.mark.parametrize("verb", [("mesh", "delete", "demo"), ("topic", "delete", "orders", "--mesh", "demo")])
async def test_what_destroys_asks_first(verb: tuple[str, ...], mailroom: Mailroom) -> None:
    refused = await Administrator(mailroom).run(*verb)
    assert refused.code == 2
    assert "--yes" in refused.sentence()


async def test_a_send_is_waited_for_until_the_broker_has_it(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    sent = await user.as_member("send", "topic:orders", "hello", "--wait", "--json")
    assert (sent.code, sent.json[0]["status"]) == (0, "done")
    lost = await user.as_member("send", "topic:nonsense", "hello", "--wait")
    assert lost.code == 1
    assert "topic_not_found" in lost.sentence()
    listed = await user.as_member("outbox", "list", "--status", "dead", "--code", "topic_not_found", "--json")
    assert len(listed.json) == 1


async def test_a_row_that_the_broker_had_accepted_before_says_so(mailroom: Mailroom, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(mailroom.token)
    message = {"to": "topic:orders", "body": "hello", "client_message_id": "from-another-host"}
    async with BrokerLink(BrokerClientSettings(url=mailroom.broker_urls[0], token_file=token)) as another:
        await another.accept([prepare(msgspec.json.encode(message))])  # type: ignore[list-item]
    user = Administrator(mailroom)
    await user.as_member("send", "topic:orders", "hello", "--id", "from-another-host", "--wait")
    shown = await user.as_member("outbox", "inspect", "from-another-host")
    assert "the broker had accepted it before" in shown.out
    again = await user.as_member("outbox", "inspect", "from-another-host", "--json")
    assert again.json[0]["row"]["duplicate"] is True


async def test_the_history_is_read_page_by_page(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    for number in range(5):
        await user.as_member("send", "topic:orders", f"page {number}", "--wait")
    async with BrokerClient(mailroom.broker_urls[0], mailroom.token) as client:
        every = [each async for each in client.history(HistoryQuery(limit=2))]
        history = [each for each in every if (each.body or "").startswith("page")]
        assert [each.body for each in history] == [f"page {number}" for number in range(5)]
        assert (await client.message(history[0].broker_message_id)).body == "page 0"
        with pytest.raises(NotFound):
            await client.message("00000000-0000-0000-0000-000000000000")
        with pytest.raises((NotPermitted, Conflict)):
            await client.delete_mesh("demo")


async def test_the_orphan_check_finds_none(mailroom: Mailroom) -> None:
    broker = mailroom.brokers[0]
    user = Terminal(**broker.settings)
    checked = await asyncio.to_thread(user.process, "broker", "orphan-check")
    assert checked.code == 0, checked.err
    as_json = await asyncio.to_thread(user.process, "broker", "orphan-check", "--json")
    assert (as_json.code, as_json.out) == (0, "")
    migrated = await asyncio.to_thread(user.process, "broker", "migrate")
    assert "up to date" in migrated.out


async def test_a_doctor_finds_a_token_that_the_broker_refuses_and_an_address_of_another_program(
    mailroom: Mailroom, tmp_path: Path
) -> None:
    """Both answer `/health`, and well."""
    stranger = tmp_path / "token"
    stranger.touch(mode=0o600)
    stranger.write_text("nobody's token, " + "x" * 20)

    async def well(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "reasons": []})

    page = web.Application()
    page.add_routes([web.get("/health", well)])
    user = Administrator(mailroom)
    async with TestServer(page) as another:
        for options, words in (
            (("--token-file", str(stranger)), "the token is not valid"),
            (("--url", str(another.make_url(""))), "check the address"),
        ):
            found = await user.as_member("doctor", "--json", *options)
            (broker,) = [each for each in found.json if each["subject"] == "broker"]
            assert (found.code, broker["verdict"]) == (1, "failed"), broker
            assert words in broker["detail"], broker


async def test_a_doctor_finds_everything_well(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    found = await user.as_member("doctor", "--json")
    verdicts = {each["subject"]: each["verdict"] for each in found.json}
    assert (found.code, verdicts["daemon"], verdicts["broker"]) == (0, "ok", "ok")
    daemon = Terminal(**mailroom.daemon.settings)
    checked = await asyncio.to_thread(daemon.run, "daemon", "check", "--json")
    assert {each["verdict"] for each in checked.json[1:]} == {"ok"}
    assert mailroom.token not in checked.out


async def test_a_token_file_that_is_none_is_named(mailroom: Mailroom) -> None:
    user = Administrator(mailroom)
    empty = mailroom.directory / "empty"
    empty.touch()
    for file in ("/nonexistent", "/", "/dev/zero", str(empty)):
        refused = await user.run("mesh", "list", "--token-file", file)
        assert refused.code in {2, 78}
        assert file in refused.sentence()
