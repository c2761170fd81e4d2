"""Which addresses a webhook may have: a tenant chooses them, and the worker is inside the operator's network.

Public addresses are allowed, and those in networks of the config (docs/contract/accept.md#accept-35). An address is
checked twice: when a webhook is registered, so that the registration fails with a reason, and when a connection is
opened, where the actual address counts. That one also refuses a name with another address by then (DNS rebinding), and
every other way of writing an address in a URL.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, Final, TypeAlias
from urllib.parse import SplitResult, urlsplit

from aiohappyeyeballs import start_connection

from postroom._wire.connections import Connection, Dial, default_tls
from postroom._wire.http import Site
from postroom.errors import InvalidMessage, TryAgain

Network: TypeAlias = IPv4Network | IPv6Network
AddressInfo: TypeAlias = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[AddressInfo]]]  # of a name and a port; raises `OSError`

_RESOLVE_SECONDS: Final = 5.0
_NEXT_SECONDS: Final = 0.25  # after which the next address of a name is tried as well
_PORTS: Final = {"http": 80, "https": 443}
_NAMED: Final = {
    ip_network("169.254.169.254/32"): "a metadata",
    ip_network("fd00:ec2::254/128"): "a metadata",
    ip_network("100.100.100.200/32"): "a metadata",
    ip_network("168.63.129.16/32"): "a metadata",  # public by its number, and reached only from inside
    ip_network("64:ff9b::/96"): "a translated",  # these lead to an IPv4 address, whichever it is
    ip_network("64:ff9b:1::/48"): "a translated",
    ip_network("2002::/16"): "a tunnelled",
    ip_network("2001::/32"): "a tunnelled",
    ip_network("192.88.99.0/24"): "a tunnelled",
    ip_network("3fff::/20"): "a reserved",  # for documentation; not every Python knows this and the next
    ip_network("5f00::/16"): "a reserved",
    ip_network("fec0::/10"): "a site-local",
}
_KINDS: Final = (
    ("is_loopback", "a loopback"),
    ("is_link_local", "a link-local"),
    ("is_multicast", "a multicast"),
    ("is_unspecified", "the unspecified"),
    ("is_private", "a private"),
    ("is_reserved", "a reserved"),
)


async def resolve(host: str, port: int) -> Sequence[AddressInfo]:
    """Return the addresses that the system knows for a name; raises `OSError` where it knows none."""
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


class Guard:
    """Lets connections through to public addresses and to `allowed` networks."""

    def __init__(self, allowed: Iterable[Network] = (), *, resolve: Resolve = resolve) -> None:
        """`resolve` looks up names in both checks."""
        self.resolve = resolve
        self._allowed = tuple(allowed)

    async def check(self, url: str) -> None:
        """Check that a webhook may have this address.

        Raises `InvalidMessage` (400, `invalid_webhook`) where it may not, `TryAgain` (503) while no name is resolved.
        """
        parts = _split(url)
        for address in await self._addresses(str(parts.hostname), parts.port or _PORTS[parts.scheme]):
            if (refusal := self.refusal(address)) is not None:  # naming it would reveal internal addresses
                raise _invalid(f"{parts.hostname} cannot be used for a webhook: it has {refusal}")

    def open_socket(self, info: AddressInfo) -> socket.socket:
        """Make the socket for a connection to `info`; raises `OSError` (EACCES) where that is not allowed."""
        family, kind, protocol, _, address = info
        if (refusal := self.refusal(address[0])) is not None:
            raise OSError(errno.EACCES, f"{address[0]} is {refusal}")
        return socket.socket(family, kind, protocol)

    def refusal(self, address: str) -> str | None:
        """Return what kind of address it is where it is not allowed; None where it is."""
        found = ip_address(address)
        found = getattr(found, "ipv4_mapped", None) or found  # the IPv4 address that an IPv4-mapped IPv6 address means
        if any(found in network for network in self._allowed):
            return None
        kind = next((name for network, name in _NAMED.items() if found in network), None)
        kind = kind or next((name for test, name in _KINDS if getattr(found, test)), None)
        if kind is None and found.is_global:
            return None
        return f"{kind or 'no public'} address, which webhooks.allow_networks does not allow"

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            return [str(ip_address(host))]
        except ValueError:
            pass
        try:
            async with asyncio.timeout(_RESOLVE_SECONDS):
                return [address[0] for *_, address in await self.resolve(host, port)]
        except TimeoutError as error:
            sentence = f"the name {host} was not resolved within {_RESOLVE_SECONDS:g} s: try again"
            raise TryAgain.of("name_service_unavailable", sentence, retryable=True) from error
        except (OSError, UnicodeError) as error:
            raise _invalid(f"the name {host} has no address: check it") from error


def dial_to(site: Site, tls: ssl.SSLContext | None, guard: Guard | None) -> Dial:
    """Return what connects to the first address of `site` that answers, of those that `guard` lets through.

    `tls` is for an https:// one, else the usual authorities.
    """
    addresses, open_socket = (resolve, None) if guard is None else (guard.resolve, guard.open_socket)

    async def dial(connection: Connection) -> None:
        context = (tls or default_tls()) if site.tls else None
        infos = await addresses(site.host, site.port)
        sock = await start_connection(infos, happy_eyeballs_delay=_NEXT_SECONDS, socket_factory=open_socket)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: connection, sock=sock, ssl=context, server_hostname=site.host if site.tls else None
            )
        except BaseException:
            sock.close()
            raise

    return dial


def _split(url: str) -> SplitResult:
    """Parse an address; raises `InvalidMessage` where it cannot be posted to, or holds credentials."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in _PORTS and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        usable = False
    if not usable or "\\" in url or parts.fragment:
        raise _invalid("give the webhook's address as http[s]://host[:port]/path, without a fragment")
    if parts.username is not None:
        raise _invalid("a webhook's address must not contain credentials: its requests are signed with the secret")
    return parts


def _invalid(sentence: str) -> InvalidMessage:
    return InvalidMessage.of("invalid_webhook", sentence, field="url")
