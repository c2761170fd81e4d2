"""Which addresses a webhook may have, when it is registered and when a connection is opened."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from ipaddress import ip_network

import pytest
from support.handlers import serving

from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.http import addresses
from postroom.delivery.http.addresses import AddressInfo, Guard
from postroom.delivery.http.client import HandlerClient
from postroom.delivery.settings import AddressSettings, HandlerSettings, networks_of
from postroom.errors import InvalidMessage, TryAgain

PUBLIC = "93.184.216.34"
REFUSED = {
    "127.0.0.1": "loopback",
    "127.8.8.8": "loopback",
    "::1": "loopback",
    "10.0.0.1": "private",
    "172.16.0.1": "private",
    "192.168.1.1": "private",
    "fd00::1": "private",
    "169.254.1.1": "link-local",
    "fe80::1": "link-local",
    "fe80::1%1": "link-local",
    "224.0.0.1": "multicast",
    "ff02::1": "multicast",
    "240.0.0.1": "private",
    "255.255.255.255": "private",
    "4000::1": "reserved",
    "0.0.0.0": "unspecified",  # noqa: S104 - nothing listens there
    "::": "unspecified",
    "100.64.0.1": "no public",
    "169.254.169.254": "metadata",
    "fd00:ec2::254": "metadata",
    "100.100.100.200": "metadata",
    "168.63.129.16": "metadata",
    "fec0::1": "site-local",
    "::ffff:127.0.0.1": "loopback",
    "::ffff:10.0.0.1": "private",
    "::ffff:169.254.169.254": "metadata",
    "::ffff:a9fe:a9fe": "metadata",
    "::127.0.0.1": "reserved",
    "64:ff9b::7f00:1": "translated",
    "2002:7f00:1::": "tunnelled",
    "64:ff9b:1::7f00:1": "translated",
    "2001:0:5db8:d822::1": "tunnelled",
    "192.88.99.1": "tunnelled",
    "3fff::1": "reserved",
    "5f00::1": "reserved",
}
"""Addresses, and a word of the reason that each is refused for."""


class Names:
    """A name server of a tenant's own: each question gets the next answer, the last one for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)

    async def __call__(self, _host: str, port: int) -> list[AddressInfo]:
        addresses = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return [_info(address, port) for address in addresses]


def _info(address: str, port: int) -> AddressInfo:
    kind, more = (socket.AF_INET6, (0, 0)) if ":" in address else (socket.AF_INET, ())
    return kind, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, *more)


async def silent(_host: str, _port: int) -> list[AddressInfo]:
    """Answer as a name server does that never answers."""
    raise TimeoutError


def written(address: str) -> str:
    return f"[{address.partition('%')[0]}]" if ":" in address else address


async def refused(guard: Guard, url: str) -> str:
    with pytest.raises(InvalidMessage) as error:
        await guard.check(url)
    assert (error.value.problem.status, error.value.code) == (400, "invalid_webhook")
    return str(error.value)


@pytest.mark.parametrize(("address", "why"), REFUSED.items())
async def test_an_address_that_is_not_public_cannot_be_registered(address: str, why: str) -> None:
    assert why in await refused(Guard(), f"http://{written(address)}:8080/hook")
    assert why in await refused(Guard(resolve=Names([PUBLIC, address])), "https://hooks.example/")


@pytest.mark.parametrize(("address", "why"), REFUSED.items())
async def test_a_name_whose_address_is_no_longer_public_is_refused_when_it_is_connected_to(
    address: str, why: str
) -> None:
    guard = Guard(resolve=Names([PUBLIC], [address]))
    await guard.check("http://hooks.example/")

    client = HandlerClient(HandlerSettings(url="http://hooks.example/"), guard=guard)
    answer = await client.call(b"{}", {})
    await client.close()

    assert (answer.status, answer.code) == (None, "address_not_allowed")
    assert f"is {why}" in answer.detail or f" {why} address" in answer.detail


LOOPBACK = "a loopback address"
NO_SUCH_NAME = "the name localhost has no address|localhost.*Name or service not known"  # where there is no /etc/hosts


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "127.1", "2130706433", "0x7f.1", "localhost"])
async def test_no_way_of_writing_an_address_gets_through_at_either_moment(host: str) -> None:
    expected = f"{LOOPBACK}|{NO_SUCH_NAME}" if host == "localhost" else LOOPBACK
    async with serving() as handler:
        url = handler.url.replace("127.0.0.1", host)
        assert re.search(expected, await refused(Guard(), url))
        client = HandlerClient(HandlerSettings(url=url), guard=Guard())
        answer = await client.call(b"{}", {})
        await client.close()

    assert (answer.status, handler.calls) == (None, [])
    assert re.search(expected, answer.detail)


async def test_a_rebound_name_reaches_nobody_and_an_allowed_network_is_reached() -> None:
    headers = {"Idempotency-Key": "m-1", "Postroom-Attempt": "1"}
    body = b'{"message_id":"m-1","subject":"s","event_type":"e","event_version":1,'
    body += b'"occurred_at":"2026-01-01T00:00:00Z","payload":{}}'
    async with serving() as handler:
        url = handler.url.replace("127.0.0.1", "hooks.example")
        answers = []
        for allowed in ((), (ip_network("127.0.0.0/8"),)):
            guard = Guard(allowed, resolve=Names([PUBLIC], ["127.0.0.1"]))
            await guard.check(url)
            client = HandlerClient(HandlerSettings(url=url), guard=guard)
            answers.append((await client.call(body, headers)).status)
            await client.close()

    assert answers == [None, 200]
    assert len(handler.calls) == 1


@pytest.mark.parametrize("address", [PUBLIC, "2606:4700::1111", "::ffff:93.184.216.34", "10.1.2.3", "::ffff:10.1.2.3"])
async def test_public_addresses_and_allowed_networks_may_be_registered(address: str) -> None:
    guard = Guard(networks_of(AddressSettings(allow_networks=["10.1.0.0/16"])), resolve=Names([address]))
    await guard.check(f"https://{written(address)}/hook?of=mine")
    await guard.check("http://hooks.example:8080/")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://hooks.example/", "http[s]"),
        ("file:///etc/passwd", "http[s]"),
        ("hooks.example", "http[s]"),
        ("http://", "http[s]"),
        ("http://hooks.example:99999/", "http[s]"),
        ("http://hooks.example:0/", "http[s]"),
        ("http://[::1/", "http[s]"),
        ("http://hooks.example/#part", "http[s]"),
        ("http://127.0.0.1\\@hooks.example/", "http[s]"),
        ("http://user@hooks.example/", "credentials"),
        ("http://user:password@hooks.example/", "credentials"),
        ("http://:@hooks.example/", "credentials"),
    ],
)
async def test_an_address_that_is_none_or_holds_credentials_cannot_be_registered(url: str, why: str) -> None:
    sentence = await refused(Guard(resolve=Names([PUBLIC])), url)
    assert why in sentence
    assert "password" not in sentence


async def test_a_name_without_an_address_cannot_be_registered_and_a_silent_name_service_may_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "has no address" in await refused(Guard(), "http://nowhere.invalid/")
    monkeypatch.setattr(addresses, "_RESOLVE_SECONDS", 0.01)
    with pytest.raises(TryAgain) as error:
        await Guard(resolve=silent).check("http://hooks.example/")
    assert (error.value.problem.status, error.value.retryable) == (503, True)


@pytest.mark.parametrize("text", ["10.0.0.1/8", "10.0.0.0/33", "localhost", ""])
def test_a_network_that_is_none_is_refused_with_its_setting(text: str) -> None:
    with pytest.raises(Fatal, match=r"webhooks\.allow_networks") as error:
        networks_of(AddressSettings(allow_networks=[text]))
    assert error.value.exit_code == Exit.CONFIG
