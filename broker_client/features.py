"""What the broker promises, and what follows from it: how old a row may become, and which rows its database may lack.

The broker's window, less a margin for clocks and sweeps, bounds every row's age (docs/contract/send.md#send-70). A
broker that cannot promise a window stops the daemon with exit code 78.
"""

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from broker_client.channel import Failure, RequestFailed
from broker_client.link import BrokerLink
from broker_client.settings import RelaySettings
from outbox import Outbox
from postroom._wire.accept import DEDUPE_MODES, DedupeFeature, Features
from postroom._wire.retry import STEADY, Backoff
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.logs import clean
from postroom.chassis.ownership import read_regular, replace_private
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

DEDUPE_VERSION: Final = 1
LEAST_RETENTION_DAYS: Final = 7
MOST_RETENTION_DAYS: Final = 36_500  # a hundred years; a broker that names more promises no more than that
LEAST_MARGIN_HOURS: Final = 24
MARGIN: Final = 0.1  # of the window
PERMANENT_HOURS: Final = 168  # max_age where the broker never forgets an id
PERMANENT_MOST_HOURS: Final = 720
HOUR: Final = 3_600_000  # ms
_DAY: Final = 24  # hours
_FILE: Final = "broker-features.json"

DEFAULT_DEDUPE: Final = DedupeFeature(
    version=DEDUPE_VERSION,
    mode="retention_scoped",
    request_fingerprint=True,
    dedupe_retention_days=LEAST_RETENTION_DAYS,
)
_FRESH_SECONDS: Final = 15.0  # in which a daemon notices that the broker's database is another one
_RETRIES: Final = Backoff(5.0, 5.0, least=STEADY)  # after a look-up of done rows that failed


def max_age_hours(features: Features, override: int | None) -> int:
    """Return the age in hours at which a row goes dead, at this broker; raises `Fatal` (78) if it is incompatible.

    The margin is max(24 h, 10 % of the window, rounded up). An `override` may use up all of it but 24 h.
    """
    dedupe = features.client_message_id_dedupe
    if dedupe is not None and dedupe.mode not in DEDUPE_MODES:
        raise Fatal(
            Exit.CONFIG,
            f"the broker recognises repeated ids in a way that this daemon does not know ({clean(dedupe.mode)}): "
            "upgrade the daemon, or point broker.url at another",
        )
    if dedupe is None or dedupe.version != DEDUPE_VERSION or not dedupe.request_fingerprint:
        raise Fatal(
            Exit.CONFIG,
            "the broker does not offer client_message_id_dedupe version 1 with request_fingerprint, "
            "so that a repeated message could be accepted twice: upgrade the broker, or point broker.url at another",
        )
    if dedupe.mode == "permanent":
        return PERMANENT_HOURS if override is None else _within(override, PERMANENT_MOST_HOURS, PERMANENT_MOST_HOURS)
    days = dedupe.dedupe_retention_days or 0
    if days < LEAST_RETENTION_DAYS:
        raise Fatal(
            Exit.CONFIG,
            f"the broker recognises a repeated id for {days} days only, {LEAST_RETENTION_DAYS} are needed: "
            "raise its dedupe retention",
        )
    window = min(days, MOST_RETENTION_DAYS) * _DAY
    derived = window - max(LEAST_MARGIN_HOURS, math.ceil(window * MARGIN))
    return derived if override is None else _within(override, window - LEAST_MARGIN_HOURS, derived)


def assumed_max_age_hours(features: Features | None, override: int | None) -> int:
    """Return the age that counts until the broker can be asked: the override, else that of the last seen features."""
    dedupe = (features.client_message_id_dedupe if features else None) or DEFAULT_DEDUPE
    assumed = Features(mesh="", member="", max_batch=1, client_message_id_dedupe=dedupe)
    return max_age_hours(assumed, None) if override is None else override


class KeptFeatures:
    """The features that the broker last showed, kept on disk for a start while it is unreachable."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / _FILE

    def load(self) -> Features | None:
        """Return what was kept, or None without a usable file; a damaged one is logged and replaced later."""
        try:
            features = msgspec.json.decode(read_regular(self._file)[0], type=Features)
            max_age_hours(features, None)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, Fatal) as error:
            _log.warning("kept_features_unusable", file=str(self._file), error=str(error))
            return None
        return features

    def save(self, features: Features) -> None:
        """Replace what was kept, whole or not at all; if that fails, the daemon logs it and goes on."""
        try:
            replace_private(self._file, msgspec.json.encode(features).decode())
        except OSError as error:
            _log.warning("features_not_kept", file=str(self._file), error=str(error))


def _within(override: int, most: int, advised: int) -> int:
    if override > most:
        raise Fatal(
            Exit.CONFIG,
            f"relay.max_age_hours is {override}, more than the {most} h in which the broker is sure to recognise a "
            f"repeated id: set it to {advised} or less, or omit it",
        )
    if override > advised:
        _log.warning("max_age_inside_margin", max_age_hours=override, advised_hours=advised)
    return override


class FeatureCheck:
    """Asks for the features at start, after an outage of the broker, whenever the token changes, and periodically.

    Until they are known, those last seen and kept on disk count, else the defaults (docs/contract/send.md#send-73).
    """

    def __init__(self, link: BrokerLink, settings: RelaySettings, state_directory: Path, mesh: str | None) -> None:
        self._link = link
        self._settings = settings
        self._mesh = mesh
        self._kept = KeptFeatures(state_directory)
        kept = self._kept.load()
        if mesh is not None and kept is not None and kept.mesh != mesh:
            raise Fatal(
                Exit.CONFIG,
                f"{state_directory} holds the outbox of the mesh {kept.mesh!r}, but this daemon serves {mesh!r}: "
                "give each mesh a state_directory of its own",
            )
        self._identity: int | None = None  # of the link, when the check was last passed
        self._asked_at = -math.inf
        self.features: Features | None = kept
        self.max_age_hours = assumed_max_age_hours(self.features, settings.max_age_hours)

    @property
    def passed(self) -> bool:
        """Whether the broker has passed the check since the process started."""
        return self._identity is not None

    @property
    def margin_ms(self) -> int:
        """Between the age at which a row goes dead and the end of the broker's window: how wrong a clock may be."""
        dedupe = (self.features.client_message_id_dedupe if self.features else None) or DEFAULT_DEDUPE
        window = min(dedupe.dedupe_retention_days or 0, MOST_RETENTION_DAYS) * _DAY
        return max(LEAST_MARGIN_HOURS, window - self.max_age_hours) * HOUR

    def is_due(self) -> bool:
        """Return whether a check has to come before any post: the token is new or missing, or the last check is old."""
        try:
            return self._link.identity() != self._identity or self.fresh_seconds() <= 0
        except RequestFailed:  # no usable token: `ask` reports it
            return True

    def fresh_seconds(self) -> float:
        """Return for how many seconds the last check still counts."""
        return self._asked_at + _FRESH_SECONDS - time.monotonic()

    async def ask(self) -> None:
        """Do the check. Raises `RequestFailed` if it has to be repeated, `Fatal` (78) if it failed permanently.

        A token of another mesh does not stop the daemon: an operator can put the right one into the file.
        """
        identity = self._link.identity()
        features = await self._link.features()
        if self._mesh is not None and features.mesh != self._mesh:
            sentence = f"the token is for the mesh {features.mesh!r}, but this daemon serves {self._mesh!r}"
            raise RequestFailed.because(Failure.NOT_PERMITTED, f"{sentence}: put another token into broker.token_file")
        self.max_age_hours = max_age_hours(features, self._settings.max_age_hours)
        if features != self.features:
            self._kept.save(features)
        self.features = features
        self._identity = identity
        self._asked_at = time.monotonic()


class Comparison:
    """Compares the done rows with the broker's database, after that was restored to an earlier state.

    That is so where its incarnation is not the one that the done rows were last compared with, or the mesh's numbers
    have gone back: then it was put in place without `postroom broker restored` (docs/contract/send.md#send-97).

    A daemon has one: call `begin` when `name_of` returns a name, and `run` it as a task.
    """

    def __init__(self, outbox: Outbox, link: BrokerLink, *, clock: Callable[[], int]) -> None:
        self._outbox = outbox
        self._link = link
        self._clock = clock
        self._due = asyncio.Event()
        self._due.set()  # one may have been under way before the start

    async def name_of(self, features: Features, last_done: int) -> str | None:
        """Return the name of the database that `features` show, or None if the done rows were compared with it.

        `last_done` is the highest number known here before the features were asked for.
        """
        name, highest = features.incarnation, features.last_history_id
        is_older = highest is not None and highest < last_done
        if name is not None and is_older:
            name = f"{name} before {last_done}"
        progress = await self._outbox.comparison()
        if progress is not None and progress.incarnation == name:
            return None
        if is_older:
            advice = "if Postgres was restored from a backup, run `postroom broker restored`"
            _log.error("broker_database_older", last_history_id=highest, known=last_done, advice=advice)
        return name

    async def begin(self, name: str, features: Features) -> None:
        """Begin to compare with the database of that name.

        Only rows whose ids the broker is sure to recognise are compared; it may have swept older ones, by its clock.
        """
        since, dedupe = 0, features.client_message_id_dedupe
        if dedupe is None or dedupe.mode != "permanent":
            since = self._link.clock.estimate(self._clock()) - max_age_hours(features, None) * HOUR
        if await self._outbox.comparison() is not None:
            _log.warning("broker_database_changed", incarnation=name)
        await self._outbox.begin_comparison(name, since)
        self._due.set()

    async def run(self) -> None:
        """Carry out each comparison that has begun, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            while (progress := await self._outbox.comparison()) is not None and not progress.ended:
                try:
                    rows, up_to = await self._outbox.stretch(progress)
                    found, lost = await self._link.compared(rows) if rows else ([], [])
                    await self._outbox.note_compared(progress, up_to, found=found, lost=lost)
                except PostroomError as error:  # the broker cannot be asked, or the disk is full
                    _log.warning("comparison_waits", code=error.code, reason=str(error))
                    await asyncio.sleep(_RETRIES.seconds(1))
            if progress is not None and (missing := await self._outbox.missing()).rows:
                _log.error(
                    "messages_missing_at_the_broker",
                    rows=missing.rows,
                    without_payload=missing.without_payload,
                    advice="postroom outbox resend --missing --reason 'the database was restored'",
                )
