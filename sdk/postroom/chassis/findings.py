"""What a check found: the answer of `daemon check` and of `doctor`, for programs and people."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that was looked at: `ok`, or what is wrong and what to do about it (`remedy`)."""

    subject: str
    verdict: Literal["ok", "warning", "failed"]
    detail: str
    remedy: str | None = None
