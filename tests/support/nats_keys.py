"""A NATS that knows its users by keys: by public keys in its config, or by tokens that an account signed (JWT)."""

from __future__ import annotations

import base64
import json
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import nkeys

from embedded import EmbeddedNats


class Key:
    """A new key of an operator, an account or a user."""

    def __init__(self, prefix: int = nkeys.PREFIX_BYTE_USER) -> None:
        self.seed: str = nkeys.encode_seed(secrets.token_bytes(32), prefix).decode()
        self._pair = nkeys.from_seed(bytearray(self.seed, "ascii"))
        self.name: str = self._pair.public_key.decode()

    def signed(self, about: Key, kind: str, *, expires_at: int = 0, **claims: Any) -> str:
        """Sign what `about` may do."""
        nats = {"type": kind, "version": 2, **claims}
        body = {"iss": self.name, "sub": about.name, "iat": int(time.time()), "exp": expires_at, "nats": nats}
        text = ".".join(map(_part, ({"typ": "JWT", "alg": "ed25519-nkey"}, body)))
        return f"{text}.{_text(self._pair.sign(text.encode()))}"


def _part(claims: dict[str, Any]) -> str:
    return _text(json.dumps(claims).encode())


def _text(octets: bytes) -> str:
    return base64.urlsafe_b64encode(octets).decode().rstrip("=")


class _WithoutPassword(EmbeddedNats):
    @property
    def url(self) -> str:
        return self.address


class NatsWithKeys(_WithoutPassword):
    """One with a user for each of `users`, public keys."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.users: list[str] = []

    def replace_users(self, *users: str) -> None:
        """Let it know these users alone, at once."""
        self.users = [*users]
        config = json.loads(self.config_file.read_text())
        self._write(config)
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGHUP)

    def _write(self, config: dict[str, Any]) -> None:
        super()._write({**config, "authorization": {"users": [{"nkey": user} for user in self.users]}})


class NatsWithTokens(_WithoutPassword):
    """One whose users have tokens of its one account, which its operator signed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._owner = Key(nkeys.PREFIX_BYTE_OPERATOR)
        self._members, self._system = (Key(nkeys.PREFIX_BYTE_ACCOUNT) for _ in range(2))

    def credentials(self, *, expires_at: int = 0) -> str:
        """Return the `.creds` file of a new user, as `nsc` writes it."""
        user = Key()
        token = self._members.signed(user, "user", expires_at=expires_at, pub={}, sub={}, subs=-1, data=-1, payload=-1)
        return _CREDENTIALS.format(token=token, seed=user.seed)

    def _write(self, config: dict[str, Any]) -> None:
        limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf", "disk_storage"), -1)
        accounts = {self._members: limits, self._system: {**limits, "disk_storage": 0}}
        super()._write(
            {
                **{name: config[name] for name in config if name != "authorization"},
                "operator": self._owner.signed(self._owner, "operator"),
                "resolver": "MEMORY",
                "resolver_preload": {
                    account.name: self._owner.signed(account, "account", limits=most)
                    for account, most in accounts.items()
                },
                "system_account": self._system.name,
            }
        )

    def _config(self) -> dict[str, Any]:
        return {"authorization": {}, **super()._config()}


_CREDENTIALS = """\
-----BEGIN NATS USER JWT-----
{token}
------END NATS USER JWT------

************************* IMPORTANT *************************
NKEY Seed printed below can be used to sign and prove identity.

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------

*************************************************************
"""
