"""Bodies of requests: limits first, then their schema (docs/contract/operate.md#operate-36)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from broker.authentication import PRINCIPAL
from broker.config import BrokerConfig
from broker.shares import Shares
from postroom._wire.message import refuse_duplicate_keys, refuse_too_many_values
from postroom._wire.transport import JSON
from postroom._wire.words import json_fault, shape_fault
from postroom.chassis.routes import is_media
from postroom.errors import InvalidMessage, PostroomError

B = TypeVar("B", bound=msgspec.Struct)

CONFIG = web.AppKey("config", BrokerConfig)
_UNSAID: Final = "application/octet-stream"  # the default of many clients
_MOST_VALUES: Final = 100_000  # of any body but a batch: decoding more would block the loop for more than 0.1 s
ROOM = web.AppKey("room", Shares)  # for bodies, in bytes


@asynccontextmanager
async def received(request: web.Request) -> AsyncIterator[bytearray]:
    """Wait until there is room for the body in the caller's share, read it, and hold the room for the block.

    415 for a body that is compressed or not JSON, 413 for a large one, 408 for a slow one, 503 where no room gets free.
    """
    config = request.app[CONFIG]
    media = request.headers.get("Content-Type", _UNSAID)
    if "Content-Encoding" in request.headers or not (media == _UNSAID or is_media(media, JSON)):
        sentence = "send the body as application/json, in UTF-8, without a Content-Encoding"
        raise InvalidMessage.of("unsupported_media_type", sentence)
    size = config.max_request_bytes if request.content_length is None else request.content_length
    if size > config.max_request_bytes:
        raise _too_large(config)
    async with request.app[ROOM].hold(request[PRINCIPAL].whose, size):
        try:
            async with asyncio.timeout(config.body_seconds):
                body = bytearray()
                async for chunk in request.content.iter_any():  # `read` lets all of it pile up first
                    body += chunk
                    if len(body) > config.max_request_bytes:
                        raise _too_large(config)
        except TimeoutError:
            sentence = f"the body did not arrive within {config.body_seconds:g} s"
            raise PostroomError.of("request_timeout", sentence, retryable=True) from None
        except (ConnectionError, web.RequestPayloadError):  # the caller has disconnected, or said that more would come
            raise InvalidMessage.of("incomplete_body", "the body ended too early: send it whole") from None
        yield body


def _too_large(config: BrokerConfig) -> InvalidMessage:
    sentence = f"the body is larger than {config.max_request_bytes} bytes: send a smaller batch"
    return InvalidMessage.of("payload_too_large", sentence)


async def decode_body(request: web.Request, kind: type[B]) -> B:
    """Return the body decoded into `kind`; a 400 says what is wrong with which field, or which key is given twice.

    413 for one with so many values that it is not decoded.
    """
    async with received(request) as body:
        return decode(bytes(body), kind)


def decode(data: bytes, kind: type[B]) -> B:
    """Return the bytes of a body decoded, as `decode_body` does."""
    refuse_too_many_values(data, _MOST_VALUES)
    try:
        decoded = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        field, sentence = shape_fault(error, kind)
        raise InvalidMessage.of("invalid_request", sentence, field=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fault = json_fault(error, data)
        sentence = f"the body is not what this route takes: {fault}; GET /openapi.json says what it must be"
        raise InvalidMessage.of("invalid_request", sentence) from error
    refuse_duplicate_keys(data)
    return decoded
