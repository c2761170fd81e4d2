"""`Client` is `AsyncClient`, method for method."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from postroom import AsyncClient, Client

METHODS = [name for name, _ in inspect.getmembers(AsyncClient, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_async_client_has_its_blocking_face(name: str) -> None:
    assert parameters(getattr(Client, name)) == parameters(getattr(AsyncClient, name))
    assert inspect.getdoc(getattr(Client, name))


def test_nothing_else_is_there() -> None:
    blocking = {name for name, _ in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")}
    assert blocking == set(METHODS)


def parameters(method: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(method).parameters.values()]
