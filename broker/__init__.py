"""The accept service: HTTP in front, Postgres behind, Redis for the limiter (docs/contract/accept.md#accept-9)."""

from postroom.chassis import import_quickly

import_quickly()
