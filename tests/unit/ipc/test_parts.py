"""The small parts of the socket: lines, ids, tokens, peers, destinations, answers."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.peers import GRACE_SECONDS, DestinationRule, LocalToken, Policy, peer_of, rotate
from ipc.sends import Splitter, idempotency_key
from ipc.shares import Budget
from outbox.model import Caller
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import user_name
from postroom.chassis.routes import is_media
from postroom.errors import InvalidMessage, NotPermitted, PostroomError, TryAgain

LIMIT = 8


@given(st.lists(st.binary(max_size=20)))
def test_lines_come_out_whole_however_the_bytes_arrive(pieces: list[bytes]) -> None:
    budget = Budget(10_000)
    splitter = Splitter(LIMIT, budget)
    lines = [line for piece in pieces for line in splitter.feed(piece)] + splitter.rest()
    whole = b"".join(pieces)
    expected = whole.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert [None if isinstance(line, PostroomError) else line for line in lines] == [
        line if len(line) <= LIMIT else None for line in expected
    ]
    assert 10_000 - budget.left == sum(len(line) for line in expected if len(line) <= LIMIT)
    splitter.close()
    assert budget.left == 10_000


def test_a_line_too_long_is_never_held() -> None:
    budget = Budget(2 * LIMIT)
    splitter = Splitter(LIMIT, budget)
    for _ in range(1000):
        assert splitter.feed(b"x" * 1000) == []
        assert len(splitter._partial) <= LIMIT
    (line, rest) = splitter.feed(b"\nok\n")
    assert isinstance(line, InvalidMessage)
    assert rest == b"ok"
    assert budget.left == 2 * LIMIT - len(b"ok")


def test_a_line_for_which_no_room_is_left_may_be_sent_again_and_the_next_one_is_taken() -> None:
    budget = Budget(9)
    first, second = Splitter(LIMIT, budget), Splitter(LIMIT, budget)
    assert first.feed(b"abcd") == []
    assert second.feed(b"efgh") == []
    (refused, whole) = second.feed(b"ij\nwhole\n")
    assert isinstance(refused, TryAgain)
    assert refused.problem.retryable
    assert whole == b"whole"
    assert budget.left == 0
    second.release(len(b"whole"))
    assert first.feed(b"ef\n") == [b"abcdef"]


def test_a_whole_line_draws_on_the_budget_until_it_is_released() -> None:
    budget = Budget(LIMIT)
    splitter = Splitter(LIMIT, budget)
    assert splitter.feed(b"abcde\n") == [b"abcde"]
    (refused,) = splitter.feed(b"fghi\n")
    assert isinstance(refused, TryAgain)
    splitter.release(len(b"abcde"))
    assert splitter.feed(b"fghi\n") == [b"fghi"]
    splitter.close()
    assert budget.left == LIMIT


def test_refused_lines_leave_the_others_that_arrived_with_them_alone() -> None:
    budget = Budget(LIMIT)
    splitter = Splitter(LIMIT, budget)
    first, too_long, second, no_room, empty = splitter.feed(b"abc\n" + b"x" * (LIMIT + 1) + b"\ndefg\nhi\n\n")
    assert (first, second, empty) == (b"abc", b"defg", b"")
    assert isinstance(too_long, InvalidMessage)
    assert isinstance(no_room, TryAgain)
    splitter.close()
    assert budget.left == LIMIT


def test_a_line_that_never_ends_gives_its_room_back() -> None:
    budget = Budget(LIMIT)
    with closing(Splitter(LIMIT, budget)) as splitter:
        splitter.feed(b"abc")
        assert budget.left == LIMIT - 3
    assert budget.left == LIMIT


@pytest.mark.parametrize(
    ("values", "expected"), [([], None), (["a"], "a"), (['"a"'], "a"), (['"'], '"'), ([" a "], "a"), ([""], "")]
)
def test_the_id_header_is_taken_bare_or_quoted(values: list[str], expected: str | None) -> None:
    assert idempotency_key(values) == expected


def test_two_id_headers_are_refused() -> None:
    with pytest.raises(InvalidMessage):
        idempotency_key(["a", "a"])


@pytest.mark.parametrize(
    ("header", "taken"),
    [
        ("application/json", True),
        ("Application/JSON", True),
        ("application/json; charset=utf-8", True),
        ('application/json;charset="UTF-8"', True),
        ("application/json; charset=utf-16", False),
        ("application/json; version=1", False),
        ("application/jsonx", False),
        ("", False),
    ],
)
def test_the_media_type_is_compared_without_regard_to_case(header: str, taken: bool) -> None:  # noqa: FBT001
    assert is_media(header, "application/json") is taken


def test_a_rotated_token_is_taken_for_its_grace_and_no_longer(tmp_path: Path) -> None:
    file = tmp_path / "local.token"
    rotate(file)
    assert file.stat().st_mode & 0o777 == 0o600
    now = [0.0]
    token = LocalToken(file, clock=lambda: now[0])
    first = file.read_text().strip()
    begun = time.time()
    rotate(file)
    second = file.read_text().strip()
    written = file.stat().st_mtime  # later than `begun` by as long as the machine stalls
    now[0] = begun + GRACE_SECONDS - 1
    assert token.matches(first)
    assert token.matches(second)
    assert not token.matches("")
    assert not token.matches(first[:-1])
    now[0] = written + GRACE_SECONDS + 1
    assert not token.matches(first)
    assert token.matches(second)


@pytest.mark.parametrize("daemon", ["asked in between", "asked after both", "restarted"])
def test_each_of_two_rotations_leaves_a_token_its_grace(tmp_path: Path, daemon: str) -> None:
    file = tmp_path / "local.token"
    rotate(file)
    now = [0.0]
    token = LocalToken(file, clock=lambda: now[0])
    replaced = {}
    for _ in range(2):
        old, begun = file.read_text().strip(), time.time()
        rotate(file)
        replaced[old] = begun + GRACE_SECONDS, file.stat().st_mtime + GRACE_SECONDS
        assert daemon != "asked in between" or token.matches(file.read_text().strip())
    if daemon == "restarted":
        token = LocalToken(file, clock=lambda: now[0])
    for old, (earliest, latest) in replaced.items():
        assert old not in "".join(each.read_text() for each in tmp_path.iterdir())
        for now[0], good in ((earliest - 1, True), (latest + 1, False)):
            assert token.matches(old) is good
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}


def test_of_rotations_at_once_each_leaves_the_token_before_it_its_grace(tmp_path: Path) -> None:
    file = tmp_path / "local.token"
    rotate(file)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: rotate(file), range(24)))
    (kept,) = (each for each in tmp_path.iterdir() if each != file)
    assert len(json.loads(kept.read_text())) == 24


@pytest.mark.parametrize("damage", [b"", b"not JSON", b'{"a": "b"}', b"[]", b'{"\xff": 1}'])
def test_what_was_kept_of_replaced_tokens_may_be_damaged(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "local.token"
    rotate(file)
    rotate(file)
    (kept,) = (each for each in tmp_path.iterdir() if each != file)
    kept.write_bytes(damage)
    assert LocalToken(file).matches(file.read_text().strip())
    rotate(file)
    assert LocalToken(file).matches(file.read_text().strip())


def test_a_list_of_replaced_tokens_that_others_may_write_admits_nobody(tmp_path: Path) -> None:
    file = tmp_path / "local.token"
    rotate(file)
    first = file.read_text().strip()
    rotate(file)
    (kept,) = (each for each in tmp_path.iterdir() if each != file)
    assert LocalToken(file).matches(first)
    kept.chmod(0o620)
    assert not LocalToken(file).matches(first)


def test_a_list_of_replaced_tokens_that_somebody_else_put_there_admits_nobody(tmp_path: Path) -> None:
    file = tmp_path / "local.token"
    rotate(file)
    first = file.read_text().strip()
    rotate(file)
    (kept,) = (each for each in tmp_path.iterdir() if each != file)
    other = kept.rename(tmp_path / "other")
    kept.symlink_to(other)
    assert not LocalToken(file).matches(first)
    kept.unlink()
    os.mkfifo(kept, 0o600)
    assert not LocalToken(file).matches(first)
    other.replace(kept)
    if os.getuid() == 0:
        os.chown(kept, 4242, -1)
        assert not LocalToken(file).matches(first)


def test_a_token_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "local.token", 0o600)
    with pytest.raises(Fatal, match="not a regular file"):
        LocalToken(tmp_path / "local.token")


def test_a_rotation_that_fails_leaves_no_token_behind(tmp_path: Path) -> None:
    (taken := tmp_path / "local.token").mkdir()
    with pytest.raises(Fatal, match="cannot write the token file") as refusal:
        rotate(taken)
    assert (refusal.value.exit_code, list(tmp_path.iterdir())) == (Exit.IO_ERROR, [taken])


@pytest.mark.parametrize(("content", "mode"), [("", 0o600), ("short", 0o600), ("x" * 40, 0o640), ("x" * 40, 0o604)])
def test_a_token_file_that_protects_nothing_is_refused(tmp_path: Path, content: str, mode: int) -> None:
    file = tmp_path / "local.token"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(Fatal) as refusal:
        LocalToken(file)
    assert refusal.value.exit_code == Exit.CONFIG


@pytest.mark.parametrize("content", [None, b"\xff" * 40], ids=["missing", "no text"])
def test_a_token_file_that_cannot_be_read_is_refused_in_words(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "local.token"
    if content is not None:
        file.touch(mode=0o600)
        file.write_bytes(content)
    with pytest.raises(Fatal, match="`postroom daemon rotate-token` writes one") as refusal:
        LocalToken(file)
    assert not {"Errno", "codec"} & set(re.findall(r"\w+", str(refusal.value)))


def test_a_file_that_others_can_read_never_becomes_the_token(tmp_path: Path) -> None:
    file = tmp_path / "local.token"
    rotate(file)
    token = LocalToken(file)
    first = file.read_text().strip()
    other = tmp_path / "other"
    other.write_text("y" * 40)
    other.chmod(0o644)
    other.replace(file)
    assert token.matches(first)
    assert not token.matches("y" * 40)


def test_a_policy_without_lists_lets_all_call_and_its_own_user_operate() -> None:
    policy = Policy()
    assert policy.may_call(Caller(4242, 4242))
    assert not policy.may_operate(Caller(4242, 4242))
    assert policy.may_operate(Caller(os.getuid(), 0))
    assert policy.may_operate(Caller(0, 0))


def test_a_policy_with_lists_lets_in_whom_they_name() -> None:
    policy = Policy([7], [8])
    assert policy.may_call(Caller(7, 7))
    assert policy.may_call(Caller(8, 8))
    assert not policy.may_call(Caller(9, 9))
    assert not policy.may_operate(Caller(7, 7))
    assert not policy.may_operate(Caller(0, 0))


def test_the_peer_of_a_unix_socket_is_who_connected() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert peer_of(here)[:2] == (os.getuid(), os.getgid())


def test_a_user_that_nobody_knows_has_no_name() -> None:
    assert user_name(3_999_999_999) is None


def test_destinations_are_allowed_by_pattern() -> None:
    rule = DestinationRule(["topic:orders*", "dm:*"])
    rule.check("topic:orders_eu")
    rule.check("dm:bob")
    with pytest.raises(NotPermitted) as refusal:
        rule.check("queue:work")
    assert refusal.value.problem.field == "to"
    DestinationRule().check("queue:work")
