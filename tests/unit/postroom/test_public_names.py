"""What users may import: the modules without an underscore, and of each the names in its `__all__`."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import postroom
from postroom import (
    agent,
    blocking,
    broker,
    client,
    errors,
    flow,
    handler,
    once,
    retry_policy,
    signatures,
    testing,
    transaction,
)
from postroom.spark import session
from postroom.testing import fixtures

RUN_BY_PROGRAMS = {"chassis", "claims", "delivery", "ledger", "worker"}  # of the extra `worker`
PUBLIC = {
    postroom: {
        "AsyncClient",
        "BatchResult",
        "BrokerClient",
        "Client",
        "Conflict",
        "EventsQuery",
        "Flow",
        "Gone",
        "HistoryQuery",
        "InboxMessage",
        "InboxQuery",
        "InvalidMessage",
        "ListQuery",
        "NotFound",
        "NotPermitted",
        "OutboxRow",
        "PostroomError",
        "RowFilter",
        "SendRequest",
        "SendResult",
        "TryAgain",
        "Unavailable",
        "new_id",
    },
    agent: {
        "Agent",
        "Command",
        "EPOCH",
        "Effect",
        "Effects",
        "Emit",
        "Envelope",
        "InvalidAgent",
        "agent_name",
        "check_agent",
        "effects_of",
        "fill_event_subject",
        "fill_subjects",
    },
    blocking: {"Client"},
    broker: {"BrokerClient"},
    client: {"AsyncClient"},
    errors: {
        "Conflict",
        "Gone",
        "InvalidMessage",
        "NotFound",
        "NotPermitted",
        "PROBLEM_JSON",
        "PostroomError",
        "Problem",
        "TryAgain",
        "Unavailable",
        "error_for",
    },
    flow: {
        "Activity",
        "Again",
        "Context",
        "Flow",
        "Handler",
        "InvalidFlow",
        "Job",
        "SPARK_WRITE",
        "Spawn",
        "Step",
        "check_flow",
        "next_steps",
    },
    handler: {"HandlerRequest"},
    once: {
        "Begun",
        "Claim",
        "Done",
        "Held",
        "KeyHeld",
        "LeaseLost",
        "Registry",
        "Result",
        "Run",
        "Scope",
        "Store",
        "open_registry",
    },
    retry_policy: {"DAY_MS", "MEMBER", "RetryPolicy", "check_retry_policy", "policy_of"},
    signatures: {
        "MAX_HEADER",
        "MIN_SECRET_BYTES",
        "REPLAY_WINDOW",
        "SIGNATURE",
        "sign",
        "standard_headers",
        "verify",
    },
    testing: {
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
    },
    fixtures: {"Mailroom", "mailroom"},
    transaction: {"AsyncConnection", "Handling", "emit", "emit_command", "inbox"},
    session: {
        "Java",
        "OLDEST",
        "VECTOR_MODULE",
        "do_without_names",
        "find_java",
        "prepare_environment",
        "provide_java",
    },
}


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_a_public_module_has_these_names_and_no_others(module):
    assert set(module.__all__) == PUBLIC[module]
    assert module.__doc__
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    assert own <= PUBLIC[module]


def test_every_module_without_an_underscore_is_public_or_run_by_a_program():
    found = {each.name for each in pkgutil.iter_modules(postroom.__path__) if not each.name.startswith("_")}
    assert found - RUN_BY_PROGRAMS - {"spark"} == {module.__name__.rpartition(".")[2] for module in PUBLIC} - {
        "postroom",
        "session",
        "fixtures",
    }
    for name in RUN_BY_PROGRAMS:
        assert importlib.import_module(f"postroom.{name}").__doc__
