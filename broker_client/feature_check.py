"""The check that the broker is one the daemon may relay to, and what was agreed: whom the token speaks for, max_age."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

from broker_client.failures import Failure, RequestFailed
from broker_client.link import BrokerLink
from broker_client.settings import RelaySettings
from broker_client.window import HOUR, KeptFeatures, assumed_max_age_hours, margin_hours, max_age_hours
from postroom.accept import Features

_FRESH_SECONDS: Final = 15.0  # in which a daemon notices that the broker's database is another one


class FeatureCheck:
    """Asks for the features at a start, after the broker was away, whenever the token changes, and now and then.

    Until they are known, those last seen count, kept on disk, else the defaults (docs/contract/send.md#send-73).
    """

    def __init__(self, link: BrokerLink, settings: RelaySettings, state_directory: Path, mesh: str | None) -> None:
        self._link = link
        self._settings = settings
        self._mesh = mesh
        self._kept = KeptFeatures(state_directory)
        self._identity: int | None = None  # of the link, when the check was last passed
        self._asked_at = -math.inf
        self.features: Features | None = self._kept.load()
        self.max_age_hours = assumed_max_age_hours(self.features, settings.max_age_hours)

    @property
    def passed(self) -> bool:
        """Whether the broker has passed the check since the process started."""
        return self._identity is not None

    @property
    def margin_ms(self) -> int:
        """Between the age at which a row goes dead and the end of the broker's window: how wrong a clock may be."""
        return margin_hours(self.features, self.max_age_hours) * HOUR

    def is_due(self) -> bool:
        """Tell whether nothing may be posted before the check: the token is new, or gone, or the last one is old."""
        try:
            return self._link.identity() != self._identity or self.fresh_seconds() <= 0
        except RequestFailed:  # no token to show: asking says so
            return True

    def fresh_seconds(self) -> float:
        """Return how long the last check is still worth something."""
        return self._asked_at + _FRESH_SECONDS - time.monotonic()

    async def ask(self) -> None:
        """Do the check. Raises `RequestFailed` where it has to be repeated, `Fatal` (78) where it failed for good.

        A token of another mesh is no reason to end: an operator can put the right one into the file.
        """
        identity = self._link.identity()
        features = await self._link.features()
        if self._mesh is not None and features.mesh != self._mesh:
            sentence = f"the token speaks for the mesh {features.mesh!r}, this daemon serves {self._mesh!r}"
            raise RequestFailed.because(Failure.NOT_PERMITTED, f"{sentence}: put another token into broker.token_file")
        self.max_age_hours = max_age_hours(features, self._settings.max_age_hours)
        if features != self.features:
            self._kept.save(features)
        self.features = features
        self._identity = identity
        self._asked_at = time.monotonic()
