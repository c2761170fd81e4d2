"""Unpublished events and deliveries: what JetStream refuses, and what an operator asks a broker about them.

The rule is docs/contract/delivery.md#delivery-27. Only the administrator may see and drop them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

import msgspec

from postroom._wire.administration import MeshQuery
from postroom._wire.nouns import Change, Noun, Result, Verb


class Failing(msgspec.Struct, frozen=True):
    """An event or a delivery whose last attempt failed; `behind` others of its aggregate wait for it."""

    id: str
    subject: str
    aggregate: str
    attempts: int
    error: str
    occurred_at: datetime
    next_attempt_at: datetime
    behind: int


class Dropped(msgspec.Struct, frozen=True):
    """An event or a delivery that an operator took out for good."""

    id: str
    subject: str
    aggregate: str
    error: str
    dropped_at: datetime
    dropped_by: str
    reason: str


class FailingPage(msgspec.Struct, kw_only=True):
    """What fails, the oldest 1,000; never a payload."""

    failing: list[Failing]


class DroppedLog(msgspec.Struct, kw_only=True):
    """What operators dropped last, oldest first."""

    dropped: list[Dropped]


class Ids(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which a verb means: all of them, or none is dropped."""

    ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1000)]


def _noun(source: str) -> Noun[MeshQuery, FailingPage, DroppedLog, Ids, str]:
    drop = Verb("Permanently drop what fails, so that what waits behind it is published.", "dropped")
    path, change = f"/v1/unpublished/{source}", Change[Ids]
    return Noun(path, MeshQuery, FailingPage, DroppedLog, change, Result[str], {"drop": drop}, "broker_admin")


UNPUBLISHED: Final = {source: _noun(source) for source in ("events", "deliveries")}
