"""Writing an agent: what the base class offers, and what its author is told."""

from enum import Enum
from typing import Any

import msgspec
import pytest

from postroom.agent import (
    Agent,
    Command,
    Emit,
    Envelope,
    InvalidAgent,
    agent_name,
    check_agent,
    effects_of,
    fill_subjects,
)
from postroom.errors import InvalidMessage


class Pricing(Agent):
    subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)

    async def receive(self, envelope: Envelope) -> Emit:
        return Emit("order_priced", {"order": envelope.payload["order"], "total": 42})


async def test_an_agent_can_be_tried_without_a_runtime():
    effect = await Pricing().receive(Envelope(type="order_placed", payload={"order": 7}))
    assert effect == Emit("order_priced", {"order": 7, "total": 42})


def test_a_right_agent_passes_and_its_subjects_are_filled_in():
    check_agent(Pricing)
    assert fill_subjects(Pricing, "demo", "default") == ["cmd.demo.default.pricing.>"]


def test_an_agent_without_a_state_has_none_and_keeps_it():
    agent = Pricing()
    assert agent.initial_state() is None
    assert agent.apply(None, Envelope(type="x")) is None


@pytest.mark.parametrize(
    ("name", "called"), [("Pricing", "pricing"), ("OrderPricing", "order_pricing"), ("HTTPProbe2", "http_probe2")]
)
def test_an_agent_is_called_after_its_class(name: str, called: str):
    assert agent_name(type(name, (Pricing,), {})) == called


def sync_receive(self: Any, envelope: Envelope) -> None:
    del self, envelope


async def yielding_receive(self: Any, envelope: Envelope) -> Any:
    del self
    yield envelope


async def async_apply(self: Any, state: None, event: Envelope) -> None:
    del self, state, event


async def takes_nothing(self: Any) -> None:
    del self


def needs_an_argument(self: Any, database: str) -> None:
    del self, database


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"subjects": ()}, "has no subjects"),
        ({"subjects": "cmd.demo.>"}, "must be a tuple of strings"),
        ({"subjects": ("cmd.{mesh}.>",)}, "nothing else in braces"),
        ({"subjects": ("cmd.{tenant.slug}.>",)}, "nothing else in braces"),
        ({"subjects": ("cmd.{tenant[slug]}.>",)}, "nothing else in braces"),
        ({"event_subject": None}, r"event_subject must be words joined by dots, one of which contains \{type\}"),
        ({"subjects": 5}, "must be a tuple of strings"),
        *(
            ({"subjects": ("demo.event.>", subject)}, "is not a subject: words joined by dots")
            for subject in ("", ".", "a..b", "a b", "a\n", "a\0", ">.a", "a.b>", "a.**")
        ),
        ({"receive": Agent.receive}, "has no receive"),
        ({"receive": takes_nothing}, r"receive must accept \(envelope\) in addition to self"),
        ({"apply": lambda self, state: (self, state)}, r"apply must accept \(state, event\)"),
        ({"initial_state": lambda self, order: (self, order)}, r"initial_state must accept \(\)"),
        ({"receive": sync_receive}, r"receive has another form: write `async def receive\(self, envelope\)`"),
        ({"receive": yielding_receive}, "with return and without yield"),
        ({"apply": async_apply}, "apply is async"),
        ({"name": "My Agent"}, "must be a lower-case letter"),
        ({"__init__": needs_an_argument}, "cannot be created without arguments"),
    ],
)
def test_a_wrong_agent_is_told_what_to_change(members: dict[str, Any], sentence: str):
    with pytest.raises(InvalidAgent, match=sentence):
        check_agent(type("Wrong", (Pricing,), members))


@pytest.mark.parametrize("other", [Pricing(), dict, "Pricing"])
def test_what_is_no_agent_is_refused(other: object):
    with pytest.raises(InvalidAgent, match="is not an agent"):
        check_agent(other)


@pytest.mark.parametrize(
    ("returned", "effects"),
    [
        (None, ()),
        (Emit("x"), (Emit("x"),)),
        ([Emit("x"), Command("billing")], (Emit("x"), Command("billing"))),
        (iter([Emit("x")]), (Emit("x"),)),
    ],
)
def test_effects_are_nothing_one_or_several(returned: object, effects: tuple[object, ...]):
    assert effects_of(returned, "pricing") == effects


@pytest.mark.parametrize(
    ("effect", "field"),
    [
        (Emit("x", version=True), "version"),
        (Emit("x", version="2"), "version"),  # type: ignore[arg-type]
        (Emit("x", entity_id=17), "entity_id"),  # type: ignore[arg-type]
        (Emit("x", entity_id="a", expected_version="1"), "expected_version"),  # type: ignore[arg-type]
        (Emit("x", entity_id="a", expected_version=1.0), "expected_version"),  # type: ignore[arg-type]
        (Command("w", workspace=5), "workspace"),  # type: ignore[arg-type]
        (Command(7), "agent"),  # type: ignore[arg-type]
    ],
)
def test_an_effect_with_a_field_of_another_type_is_refused_before_it_is_kept(
    effect: Emit | Command, field: str
) -> None:
    """Nobody could read its record again."""
    with pytest.raises(InvalidMessage, match=f"cannot have: {field}: Expected ") as refused:
        effects_of([Emit("fine"), effect], "pricing")
    assert refused.value.code == "invalid_effect"


class _Kind(str, Enum):  # noqa: UP042 - as programs for Python before 3.11 have it
    PLACED = "placed"


class _Text(str):
    __slots__ = ()


class _Number(int):
    pass


@pytest.mark.parametrize("text", [_Kind.PLACED, _Text("placed")])
def test_texts_and_numbers_of_any_class_become_those_that_a_replay_reads(text: str) -> None:
    numbers = {"entity_id": text, "expected_version": _Number(2)}
    returned = [Emit(text, text, _Number(2), **numbers), Command(text, text, workspace=text)]
    emit, command = effects_of(returned, "pricing")
    assert emit == Emit("placed", text, 2, "placed", 2)
    assert command == Command("placed", "placed", workspace="placed")
    fields = [*msgspec.structs.astuple(emit), *msgspec.structs.astuple(command)]
    assert {type(each) for each in fields if each is not text} == {str, int, type(None)}


@pytest.mark.parametrize("returned", ["x", b"x", {"x": 1}, 7, [Emit("x"), None]])
def test_what_is_no_effect_is_refused_with_what_to_return(returned: object):
    with pytest.raises(InvalidMessage, match="return None, an Emit, a Command, or a list of them"):
        effects_of(returned, "pricing")
