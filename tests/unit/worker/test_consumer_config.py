"""Every setting of a consumer is described, overridden by its variable, and masked where it is a secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from postroom.chassis.config import MASK, effective, settings
from postroom.chassis.exits import Exit, Fatal
from postroom.worker.config import CONSUMER_PREFIX as PREFIX
from postroom.worker.config import ConsumerConfig, direct_config
from postroom.worker.config import load_consumer_config as load_config

EXAMPLE = Path(__file__).parents[3] / "systemd/examples/consumer.toml"
SERVERS = {"POSTROOM_NATS_URL": "nats://u:hidden@host", "POSTROOM_DATABASE_URL": "postgresql://u:hidden@host/x"}


def test_every_setting_says_what_it_does() -> None:
    assert [setting.path for setting in settings(ConsumerConfig) if not setting.description] == []


def test_the_example_is_a_config_whose_passwords_are_masked() -> None:
    config = load_config(EXAMPLE, {})
    shown = {".".join(setting.path): value for setting, value in effective(config)}

    assert (config.context, config.consumer.durable, config.handler.secret_file) == ("orders", "billing", None)
    assert (shown["database_url"], shown["nats.url"]) == (MASK, MASK)
    assert config.stream is not None  # the context's default, declared where it is missing


def test_a_variable_overrides_the_file() -> None:
    config = load_config(EXAMPLE, {f"{PREFIX}CONSUMER_MAX_DELIVER": "3", f"{PREFIX}LISTEN_PORT": "0"})

    assert (config.consumer.max_deliver, config.listen_port) == (3, 0)


def test_three_words_make_a_config_of_a_contexts_events() -> None:
    config = direct_config(context="demo", name="orders", handler="http://127.0.0.1:8000/handle", environ=SERVERS)

    assert (config.consumer.stream, config.consumer.durable) == ("DEMO_EVENTS", "orders")
    assert (config.consumer.filter_subjects, config.nats.url) == ([], "nats://u:hidden@host")


def test_a_stream_and_subjects_can_be_named() -> None:
    config = direct_config(
        context="sea",
        name="sea__from_vibespro",
        handler="http://127.0.0.1:8000/",
        stream="VIBESPRO_EVENTS",
        subjects=["vibespro.event.a.>", "vibespro.event.b.>"],
        environ=SERVERS,
    )

    assert config.consumer.filter_subjects == ["vibespro.event.a.>", "vibespro.event.b.>"]
    assert config.stream is None  # another context's: nobody here may declare it


def test_requests_can_be_signed() -> None:
    config = direct_config(
        context="demo", name="orders", handler="http://host/", secret_file=Path("/run/secret"), environ=SERVERS
    )

    assert config.handler.secret_file == Path("/run/secret")


@pytest.mark.parametrize("environ", [{}, {**SERVERS, "POSTROOM_NATS_URL": ""}])
def test_what_is_missing_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(Fatal) as refused:
        direct_config(context="demo", name="orders", handler="http://host/", environ=environ)
    assert refused.value.exit_code == Exit.CONFIG


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"context": "Demo"}, "--context: the context 'Demo' is not snake_case: a lower-case letter, then"),
        ({"context": "Demo", "stream": "S"}, "--context: Expected a name: a lower-case letter, then"),
        ({"name": "new orders"}, "--name: Expected a name: 1 to 64 letters, digits, `_` and `-`"),
        ({"name": "orders\n"}, "--name: Expected a name: "),
        ({"stream": "of orders"}, "--stream: Expected a name: "),
        ({"subjects": ["demo.event.>", "demo event"]}, "--subject: Expected a subject: words joined by dots"),
    ],
)
def test_an_option_whose_value_is_wrong_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(Fatal) as refused:
        direct_config(**{"context": "demo", "name": "orders", "handler": "http://host/", "environ": SERVERS} | wrong)
    assert str(refused.value).startswith(said)
    assert refused.value.exit_code == Exit.USAGE


@pytest.mark.parametrize("subject", ["demo.event.", "demo.*event", "demo event", ">.event"])
def test_a_filter_that_no_message_can_have_is_refused_before_nats_is_asked(subject: str) -> None:
    wrong = r"filter_subjects.*a subject: words joined by dots, `\*` for any one word, a last `>`"
    with pytest.raises(Fatal, match=wrong) as refused:
        load_config(EXAMPLE, {f"{PREFIX}CONSUMER_FILTER_SUBJECTS": subject})
    assert refused.value.exit_code == Exit.CONFIG


def test_what_may_be_published_again_must_be_remembered_for_longer() -> None:
    with pytest.raises(Fatal, match=r"inbox\.keep_days \(7\) is not longer than inbox\.horizon_days \(7\)") as refused:
        load_config(EXAMPLE, {f"{PREFIX}INBOX_KEEP_DAYS": "7"})
    assert refused.value.exit_code == Exit.CONFIG
