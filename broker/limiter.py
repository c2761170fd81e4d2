"""The rate limiter of B1: a fixed window per mesh and per member (docs/contract/accept.md#accept-25).

A window keeps the set of its ids, so that a retry costs nothing. Without Redis (docs/contract/accept.md#accept-30) a
window in this process decides, or everything waits; where the config has none, that window decides alone.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Final, NamedTuple, TypeVar

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from broker.config import LimiterConfig
from broker.metrics import Metrics
from postroom._wire.http import why_unreachable
from postroom.chassis.exits import Exit, Fatal
from postroom.errors import TryAgain

_log = structlog.get_logger(__name__)

A = TypeVar("A")

_PREFIX: Final = "postroom:limit:{%s}"
_AUTHORITIES: Final = "redis_url (…?ssl_ca_certs=FILE)"
_FULL: Final = "max number of clients reached"  # in Redis's words
_FAILURES: Final = (RedisError, OSError, TimeoutError)


class Admission(NamedTuple):
    """The limiter's decision about a batch: the ids it denied, and the seconds until the next window."""

    denied: frozenset[str]
    retry_after: float


class LimiterClosed(TryAgain):
    """Redis does not answer and `limiter.on_error` is `closed`: nothing is let through."""


class RedisWindow:
    """The window that all brokers share: `limiter.lua`, atomic in Redis."""

    def __init__(self, redis: Redis, config: LimiterConfig) -> None:
        self._script = redis.register_script(files("broker").joinpath("limiter.lua").read_text("utf-8"))
        self._limits = (config.per_mesh, config.per_member, config.window_seconds)

    async def admit(self, mesh: str, member: str, ids: Sequence[str]) -> Admission:
        """Take a unit of mesh and member for each id that has none yet, each once; raises as redis-py does."""
        remaining_ms, *positions = await self._script(keys=[_PREFIX % mesh], args=[member, *self._limits, *ids])
        return Admission(frozenset(ids[position - 1] for position in positions), remaining_ms / 1000)

    async def probe(self) -> None:
        """Take the unit of a second, of a mesh that cannot exist; raises as redis-py does.

        A ping would not do: a full Redis, or a replica, answers it and takes no units.
        """
        await self._script(keys=[_PREFIX % "-"], args=["-", 1, 1, 1, "probe"])


class LocalWindow:
    """The same window in this process, while Redis is unreachable. The clock (seconds) is injected."""

    def __init__(self, config: LimiterConfig, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._clock = clock
        self._number = 0
        self._taken: dict[tuple[str, ...], set[str]] = {}

    async def admit(self, mesh: str, member: str, ids: Sequence[str]) -> Admission:
        """Count in memory; never fails."""
        seconds = self._config.window_seconds
        now = self._clock()
        number = int(now // seconds)
        if number != self._number:
            self._number = number
            self._taken.clear()
        of_mesh = self._taken.setdefault((mesh,), set())
        of_member = self._taken.setdefault((mesh, member), set())
        denied = frozenset(client_id for client_id in ids if not self._take(client_id, of_mesh, of_member))
        return Admission(denied, seconds - now % seconds)

    def _take(self, client_id: str, of_mesh: set[str], of_member: set[str]) -> bool:
        if client_id not in of_mesh and len(of_mesh) >= self._config.per_mesh:
            return False
        if client_id not in of_member and len(of_member) >= self._config.per_member:
            return False
        of_mesh.add(client_id)
        of_member.add(client_id)
        return True


class Breaker:
    """Keeps a failing peer from costing a deadline per batch: after some failures in a row it gets a rest.

    After the rest one caller tries again; the others go on without it until that one succeeds.
    """

    def __init__(self, failures: int, rest_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._allowed = failures
        self._rest = rest_seconds
        self._monotonic = monotonic
        self._failures = 0
        self._closed_until = 0.0

    def may_try(self) -> bool:
        """Return whether the peer may be asked now; the one caller that may after a rest starts the next rest."""
        if self._failures < self._allowed:
            return True
        if self._monotonic() < self._closed_until:
            return False
        self._closed_until = self._monotonic() + self._rest
        return True

    def succeeded(self) -> None:
        """Note an answer: all callers may ask again."""
        self._failures = 0

    def failed(self) -> None:
        """Note a failure; enough of them in a row begin a rest."""
        self._failures += 1
        self._closed_until = self._monotonic() + self._rest


class Limiter:
    """Redis behind a deadline and a breaker, and the configured fallback without it."""

    def __init__(self, redis: RedisWindow | None, config: LimiterConfig, metrics: Metrics) -> None:
        self._redis = redis
        self._local = LocalWindow(config)
        self._breaker = Breaker(config.breaker_failures, config.breaker_seconds)
        self._config = config
        self._metrics = metrics
        self._failure: Exception | None = None  # of the last try

    @property
    def degraded(self) -> str | None:
        """Why Redis does not decide at present, as a sentence; None while it does."""
        if self._redis is None:
            return "no Redis is configured (redis_url): each broker limits by itself"
        match self._failure:
            case None:
                return None
            case AuthenticationError() | NoPermissionError():
                trouble = "Redis refuses the login"
            case ResponseError():
                trouble = f"Redis refuses a command ({_said(self._failure)})"
            case RedisError() if _FULL in str(self._failure):
                trouble = f"Redis refuses the connection ({_FULL}): raise its maxclients"
            case _:
                trouble = why_unusable(self._failure) or "Redis does not answer"
        if self._config.on_error == "local":
            return f"{trouble}: each broker limits by itself, at the same rate"
        return f"{trouble}: messages wait until it does (limiter.on_error = closed)"

    async def admit(self, mesh: str, member: str, ids: Sequence[str]) -> Admission:
        """Take a unit for each id; raises `LimiterClosed` without Redis where the config says so."""
        admission, decider, decisions = None, "redis", self._metrics.limiter_decisions
        if self._redis is not None and self._breaker.may_try():
            admission = await self._guard(self._redis.admit(mesh, member, ids))
        if admission is None:
            if self._config.on_error == "closed":
                decisions.labels("closed", "denied").inc(len(ids))
                sentence = "the rate limiter cannot be reached: send the message again under the same id"
                rest = self._config.breaker_seconds
                raise LimiterClosed.of("limiter_unavailable", sentence, retryable=True, retry_after=rest)
            admission, decider = await self._local.admit(mesh, member, ids), "local"
        decisions.labels(decider, "denied").inc(len(admission.denied))
        decisions.labels(decider, "admitted").inc(len(ids) - len(admission.denied))
        return admission

    async def probe(self) -> None:
        """Check whether Redis answers: readiness must not wait for the next batch."""
        if self._redis is not None and self._breaker.may_try():
            await self._guard(self._redis.probe())

    async def _guard(self, question: Awaitable[A]) -> A | None:
        """Ask Redis within the deadline; None where it failed, which the breaker notes."""
        try:
            async with asyncio.timeout(self._config.timeout_ms / 1000):
                answer = await question
        except _FAILURES as error:
            # what refuses a new connection is the cause of what redis-py raises
            failure = error.__cause__ if isinstance(error.__cause__, RedisError) else error
            if str(failure) != str(self._failure):  # an outage repeats one at every try
                why = why_unusable(failure) or _said(failure) or "no answer in time"
                _log.warning("limiter_degraded", error=why, on_error=self._config.on_error)
            self._failure = failure
            self._breaker.failed()
            self._metrics.limiter_degraded.set(1)
            return None
        if self._failure is not None:
            _log.info("limiter_recovered")
        self._failure = None
        self._breaker.succeeded()
        self._metrics.limiter_degraded.set(0)
        return answer


def _said(failure: BaseException) -> str:
    """Return what Redis said, without the line of our script that it adds."""
    return str(failure).partition(" script: ")[0]


def why_unusable(failure: BaseException) -> str | None:
    """Say in words why there is no safe connection to Redis; None where TLS is not why."""
    cause: BaseException | None = failure  # redis-py raises in its place, and quotes OpenSSL
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return None if cause is None else f"Redis cannot be used: {why_unreachable(cause, _AUTHORITIES)}"


def open_redis(url: str, config: LimiterConfig) -> Redis:
    """Open a client that neither retries nor waits beyond the limiter's deadline; it connects when first used.

    Raises `Fatal` (78) where it is not a Redis URL, has an option that its connections do not take, or names a file for
    TLS that cannot be used.
    """
    seconds = config.timeout_ms / 1000
    retry = Retry(NoBackoff(), 0)
    try:
        redis = Redis.from_url(
            url, socket_timeout=seconds, socket_connect_timeout=seconds, retry=retry, decode_responses=True
        )
        pool = redis.connection_pool
        connection = pool.connection_class(**pool.connection_kwargs)  # not connected: only this looks at the options
        if (tls := getattr(connection, "ssl_context", None)) is not None:
            tls.get()
    except OSError as error:  # or an ssl.SSLError
        files = "ssl_ca_certs, ssl_certfile or ssl_keyfile"
        why = error.strerror if error.filename or not isinstance(error, ssl.SSLError) else "it is not what it should be"
        raise Fatal(Exit.CONFIG, f"redis_url: a file of {files} cannot be used: {why}; check these files") from error
    except (ValueError, TypeError, RedisError) as error:
        sentence = "redis_url is not a Redis URL, or has an option that such a URL does not take"
        raise Fatal(Exit.CONFIG, f"{sentence}: write redis://host:port/0, rediss://… or unix://path") from error
    return redis
