"""Testing programs that use Postroom (docs/testing.md): real checks and real stores, with servers only where needed.

    from postroom.testing import FakeClient

    def test_an_order_is_announced():
        post = FakeClient()
        place_order(post, 17)
        assert [(sent.to, sent.json()) for sent in post.sent] == [("topic:orders", {"order": 17})]

The checks, and the answer to a repeated id, are the daemon's own code. `handler_request` makes the request that a
consumer makes; `AgentCase` runs an agent on its real store; `FlowCase` runs a flow with a crash at every commit. The
pytest fixture `mailroom`, a whole installation, is in `postroom.testing.fixtures`.

`FakeClient` needs nothing but `postroom`; the others need `postroom[testing]`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from postroom.testing.agents import AgentCase, Received
    from postroom.testing.fake import FakeAsyncClient, FakeClient, FakeDaemon, Sent
    from postroom.testing.flows import FlowCase, FlowRun
    from postroom.testing.requests import ConsumerRequest, handler_request

__all__ = [
    "AgentCase",
    "ConsumerRequest",
    "FakeAsyncClient",
    "FakeClient",
    "FakeDaemon",
    "FlowCase",
    "FlowRun",
    "Received",
    "Sent",
    "handler_request",
]

_HOMES: Final = {
    "agents": ("AgentCase", "Received"),
    "fake": ("FakeAsyncClient", "FakeClient", "FakeDaemon", "Sent"),
    "flows": ("FlowCase", "FlowRun"),
    "requests": ("ConsumerRequest", "handler_request"),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'postroom.testing' has no attribute {name!r}")
    try:
        return getattr(import_module(f"postroom.testing.{_HOME_OF[name]}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}: pip install 'postroom[testing]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
