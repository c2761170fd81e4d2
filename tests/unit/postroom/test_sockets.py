from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from postroom import Unavailable
from postroom._wire import transport
from postroom._wire.transport import find_socket


@pytest.fixture
def runtime(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of this test's, and no system's."""
    monkeypatch.setattr(transport, "SYSTEM_DIRECTORY", short_directory / "run")
    (short_directory / "postroom").mkdir()
    return short_directory


@pytest.fixture
def bind() -> Iterator[object]:
    with ExitStack() as open_sockets:

        def bind_one(path: Path) -> Path:
            path.parent.mkdir(exist_ok=True)
            sock = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
            sock.bind(str(path))
            return path

        yield bind_one


def test_a_named_socket_wins(runtime: Path) -> None:
    environ = {"POSTROOM_SOCKET": "/elsewhere.sock", "XDG_RUNTIME_DIR": str(runtime)}
    assert find_socket("/mine.sock", environ) == Path("/mine.sock")
    assert find_socket(None, environ) == Path("/elsewhere.sock")


def test_the_only_socket_of_the_user_is_found(runtime: Path, bind: object) -> None:
    path = bind(runtime / "postroom" / "demo.sock")  # type: ignore[operator]
    assert find_socket(None, {"XDG_RUNTIME_DIR": str(runtime)}) == path


def test_the_systems_socket_is_found_without_a_runtime_directory(runtime: Path, bind: object) -> None:
    path = bind(runtime / "run" / "demo.sock")  # type: ignore[operator]
    assert find_socket(None, {}) == path


def test_several_sockets_are_a_question(runtime: Path, bind: object) -> None:
    for name in ("one.sock", "two.sock"):
        bind(runtime / "postroom" / name)  # type: ignore[operator]
    with pytest.raises(Unavailable) as caught:
        find_socket(None, {"XDG_RUNTIME_DIR": str(runtime)})
    assert caught.value.code == "socket_ambiguous"
    assert "one.sock" in str(caught.value)
    assert "two.sock" in str(caught.value)


def test_what_is_no_socket_is_not_taken_for_one(runtime: Path) -> None:
    (runtime / "postroom" / "demo.sock").write_text("x")
    with pytest.raises(Unavailable) as caught:
        find_socket(None, {"XDG_RUNTIME_DIR": str(runtime)})
    assert caught.value.code == "daemon_absent"
    assert "POSTROOM_SOCKET" in str(caught.value)


@pytest.mark.parametrize(("length", "fits"), [(107, True), (108, False)])
def test_the_length_of_a_socket_path_is_limited(length: int, *, fits: bool) -> None:
    path = "/" + "x" * (length - 1)
    if fits:
        assert find_socket(path, {}) == Path(path)
    else:
        with pytest.raises(Unavailable, match="limit is 107"):
            find_socket(path, {})
