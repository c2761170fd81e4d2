"""A NATS whose users may do what a test grants them, and an `admin` who may do everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedded import EmbeddedNats

Grants = Mapping[str, tuple[Sequence[str], Sequence[str]]]
"""By user, the subjects that it may publish to and subscribe to."""


class NatsWithUsers(EmbeddedNats):
    """Each user's password is its name."""

    def __init__(self, directory: Path, grants: Grants) -> None:
        super().__init__(directory)
        self._grants = grants

    @property
    def url(self) -> str:
        return self.url_of("admin")

    def url_of(self, user: str) -> str:
        return self.address.replace("//", f"//{user}:{user}@")

    def _write(self, config: dict[str, Any]) -> None:
        users: list[dict[str, Any]] = [{"user": "admin", "password": "admin"}]
        for name, (publish, subscribe) in self._grants.items():
            permissions = {"publish": {"allow": list(publish)}, "subscribe": {"allow": list(subscribe)}}
            users.append({"user": name, "password": name, "permissions": permissions})
        super()._write({**config, "authorization": {"users": users}})
