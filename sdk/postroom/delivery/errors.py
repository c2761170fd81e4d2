"""The errors of delivery, each with its sentence, and the errors of NATS mapped in one place."""

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final

import nats.errors
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError
from nats.protocol.parser import PERMISSIONS_ERR

from postroom._wire.http import why_unreachable
from postroom._wire.programs import AWAY_SECONDS
from postroom._wire.sql import why_failed
from postroom._wire.words import when
from postroom.chassis.exits import Fatal
from postroom.chassis.postgres import why_waiting
from postroom.errors import Conflict, InvalidMessage, NotFound, NotPermitted, PostroomError, TryAgain, Unavailable

NATS_ERRORS: Final = (nats.errors.Error, OSError, asyncio.TimeoutError)  # what nats-py raises; the rest are bugs

_STREAM_NOT_FOUND: Final = 10059
_NO_STORAGE: Final = frozenset({10002, 10023, 10028, 10047})  # memory or disk of the account or the server is used up
_DISABLED: Final = frozenset({10039, 10076})  # JetStream, for the account or the server
_UNREACHABLE: Final = (
    asyncio.TimeoutError,
    OSError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.NoRespondersError,
    nats.errors.NoServersError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.StaleConnectionError,
    NoStreamResponseError,
    ServiceUnavailableError,
)


def invalid_subject(detail: str) -> InvalidMessage:
    """Refuse what is not a valid subject, or a part of one; `detail` states the rule."""
    return InvalidMessage.of("invalid_subject", detail, field="subject")


def is_refusal(error: Exception | None) -> bool:
    """Return whether the server refused this user."""
    return isinstance(error, nats.errors.AuthorizationError) or "authorization" in str(error).lower()


def from_nats(error: Exception, doing: str) -> PostroomError:
    """Map an error of nats-py, or a file that it cannot use, that ended `doing` ("creating the stream SEA_EVENTS")."""
    if isinstance(error, PostroomError):
        return error
    if is_refusal(error) or PERMISSIONS_ERR in str(error):
        why = "NATS refused this user: check the url and credentials"
        if not is_refusal(error):
            why = f"NATS refuses it ({str(error).removeprefix('nats: ')}): give this user that permission"
        return NotPermitted.of("nats_refused", f"{doing}: {why}")
    if isinstance(error, nats.errors.MaxPayloadError):
        return too_large(doing)
    if isinstance(error, (ssl.SSLError, Fatal)):
        if isinstance(error, Fatal):
            why = str(error)
        elif error.reason == "TLSV13_ALERT_CERTIFICATE_REQUIRED":
            why = "it asks for a certificate: set nats.cert_file and nats.key_file"
        else:
            why = why_unreachable(error, "nats.ca_file")
        return Unavailable.of("nats_unavailable", f"{doing}: {why}", retryable=True)
    if isinstance(error, _UNREACHABLE) and getattr(error, "err_code", None) not in _NO_STORAGE:
        return Unavailable.of("nats_unavailable", f"{doing}: {_why_unanswered(error)}", retryable=True)
    return _from_jetstream(error, doing)


@contextmanager
def mapped(doing: str, kinds: type[Exception] | tuple[type[Exception], ...] = NATS_ERRORS) -> Iterator[None]:
    """Raise an error of the block, of these `kinds`, as `from_nats` maps it."""
    try:
        yield
    except kinds as error:
        raise from_nats(error, doing) from error


def why_passing(error: Exception, doing: str) -> str:
    """Say in words why `doing` has to wait, for an error of NATS or Postgres, or a sentence already."""
    return str(from_nats(error, doing)) if isinstance(error, nats.errors.Error) else why_waiting(error)


def _why_unanswered(error: Exception) -> str:
    if getattr(error, "err_code", None) in _DISABLED:
        return "JetStream is not enabled for this user: enable it in the config of NATS, or for the user's account"
    if isinstance(error, TimeoutError):
        return "JetStream does not answer in time"
    said = why_unreachable(error, "nats.ca_file") if isinstance(error, OSError) else ""
    said = said or getattr(error, "description", None) or str(error) or type(error).__name__
    return f"JetStream does not answer ({said.removeprefix('nats: ')})"


def _from_jetstream(error: Exception, doing: str) -> PostroomError:
    """Map an error that JetStream itself returned."""
    number = error.err_code if isinstance(error, APIError) else None
    sentence = getattr(error, "description", None) or str(error)
    if number == _STREAM_NOT_FOUND:
        advice = "declare it, as a worker does for each mesh"
        return NotFound.of("stream_not_found", f"{doing}: there is no such stream; {advice}")
    if number in _NO_STORAGE:
        advice = "lower max_bytes, or give it or the account more disk"
        detail = f"{doing}: JetStream has no room for it ({sentence}): {advice}"
        return TryAgain.of("jetstream_full", detail, retryable=True)
    return PostroomError.of("nats_error", f"{doing}: {sentence}")


def too_large(doing: str) -> InvalidMessage:
    """Say that NATS accepts no message of that size."""
    detail = f"{doing}: the message is too large for NATS; raise max_payload in the server's config"
    return InvalidMessage.of("payload_too_large", detail)


def subjects_absent(name: str, stream: str, subjects: list[str], has: list[str]) -> NotFound:
    """Refuse a new consumer of subjects that no message of its stream can have."""
    detail = (
        f"declaring the consumer {name}: the stream {stream} has no subject that {', '.join(subjects)} could be, only "
        f"{', '.join(has)}: correct filter_subjects, or declare the stream with it"
    )
    return NotFound.of("subject_not_found", detail)


def stream_unknown(name: str) -> NotFound:
    """Say that nothing is recorded as published into a stream."""
    detail = f"nothing is recorded as published into a stream {name!r}: give its whole name, as in DEMO_EVENTS"
    return NotFound.of("stream_not_found", detail, field="stream")


def would_lose(diff: str, consumer: str | None = None) -> Conflict:
    """Refuse to change a stream, or the `consumer` of that id, where messages could be lost."""
    way = "do it by hand" if consumer is None else f"first delete it: `postroom consumer delete {consumer}`"
    detail = f"{diff}; this would lose messages or cannot be changed in place: adapt the config, or {way}"
    return Conflict.of("stream_differs", detail)


def name_taken(diff: str) -> Conflict:
    """Refuse another filter for a consumer that a program is reading from at the moment."""
    advice = "stop it first if this one replaces it, or give this one a durable name of its own"
    detail = f"{diff}; another program consumes under this name now: {advice}"
    return Conflict.of("consumer_in_use", detail, retryable=True)


def subjects_taken(durable: str, stream: str, subjects: list[str], others: list[str]) -> Conflict:
    """Refuse a second consumer of subjects that a work queue gives to one; `others` says which has which subjects."""
    detail = (
        f"{durable} cannot have {', '.join(subjects)} of the work queue {stream}: {'; '.join(others)}. If this "
        "program had that name before, set it as its durable; otherwise stop the other program, and delete its "
        f"consumer: `postroom consumer delete {stream}/NAME`"
    )
    return Conflict.of("subjects_taken", detail)


def subjects_overlap(durable: str, subjects: list[str]) -> Conflict:
    """Refuse a consumer that would get a message by two of its subjects."""
    detail = f"{durable} would get a message by more than one of {', '.join(subjects)}: omit what another one covers"
    return Conflict.of("subjects_overlap", detail)


def letter_not_found(letter: str) -> NotFound:
    """Say that there is no such dead letter."""
    detail = f"there is no dead letter {letter!r}: see `postroom dlq list`"
    return NotFound.of("dead_letter_not_found", detail)


def letter_settled(letter: str, act: str, actor: str, at: datetime) -> NotFound:
    """Say what was done with a dead letter before."""
    detail = f"the dead letter {letter!r} was {act} by {actor} on {when(at)}: see `postroom dlq log`"
    return NotFound.of("dead_letter_not_found", detail)


def not_failing(source: str, key: str) -> NotFound:
    """Say that no event or delivery with that id is failing to be published; `source` is `events` or `deliveries`."""
    detail = f"{key!r} is not among the failing {source}: see `postroom worker {source} list`"
    return NotFound.of("not_failing", detail)


def was_dropped(source: str, key: str, actor: str, at: datetime) -> NotFound:
    """Say who dropped that event or delivery before."""
    detail = f"{key!r} was dropped by {actor} on {when(at)}: see `postroom worker {source} log`"
    return NotFound.of("not_failing", detail)


def consumer_gone(letter: str, consumer: str, subject: str) -> Conflict:
    """Refuse a replay that no consumer would take, or that the server would take for a request to itself."""
    why = f"its consumer {consumer!r} does not consume {subject!r} now; start it with that subject, or drop the letter"
    if not consumer:
        why = f"no stream has its subject {subject!r}; declare one that has it, or drop the letter"
    return Conflict.of("consumer_gone", f"cannot replay {letter}: {why}")


def not_of_mesh(letter: str, subject: str, mesh: str) -> Conflict:
    """Refuse a replay to a subject that a letter of the mesh cannot have come from."""
    why = f"no message of {mesh} that died without a record has the subject {subject!r}: drop the letter"
    return Conflict.of("foreign_subject", f"cannot replay {letter}: {why}")


def letter_elsewhere(letter: str, consumer: str) -> Conflict:
    """Refuse to settle a letter whose row is in another database, where it would stay unsettled."""
    where = f"the dead letter {letter} is in another database, that of its consumer {consumer!r}"
    return Conflict.of("letter_elsewhere", f"{where}: ask a broker on that database (POSTROOM_BROKER_URL)")


def letter_not_kept(letter: str, error: Exception) -> Unavailable:
    """Say that Postgres did not accept a dead letter."""
    detail = f"cannot store the dead letter of {letter}: Postgres did not accept it ({why_failed(error)})"
    return Unavailable.of("letter_not_kept", detail, retryable=True)


def consumer_not_found(name: str) -> NotFound:
    """Say that no stream has a durable consumer of that name."""
    return NotFound.of("consumer_not_found", f"there is no consumer {name!r}: `postroom consumer list` shows them")


def cannot_pause(consumer: str, version: str) -> Unavailable:
    """Say that the server is too old to pause a consumer."""
    detail = f"cannot pause {consumer}: NATS {version} does not support it: update it to 2.11, or stop its program"
    return Unavailable.of("nats_too_old", detail)


def still_runs(consumer: str) -> Conflict:
    """Refuse to delete a consumer that a program runs at the moment, and would make again at once."""
    killed = f"one that was killed counts for {AWAY_SECONDS:g} s"
    detail = f"cannot delete {consumer}: a program runs it now; stop that first ({killed})"
    return Conflict.of("consumer_in_use", detail, retryable=True)


def no_nats(doing: str) -> Unavailable:
    """Say that something needs NATS, which cannot be reached."""
    return Unavailable.of("nats_unreachable", f"{doing}: NATS cannot be reached", retryable=True)


def no_payload(letter: str) -> Conflict:
    """Refuse to replay a letter without a payload."""
    why = "it has no payload, since another program wrote it, or it was too large for NATS"
    return Conflict.of("nothing_to_replay", f"cannot replay {letter}: {why}; inspect it, or drop it")
