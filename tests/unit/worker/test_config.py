"""Every setting of the worker is described, overridden by its variable, and masked where it is a secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.config import BrokerConfig
from postroom.chassis.config import MASK, effective, settings
from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.settings import KindDefaults, StreamDefaults, StreamSettings
from postroom.worker.config import AgentConfig, ConsumerConfig, WorkerConfig, load_config

ENVIRON = {"POSTROOM_DATABASE_URL": "postgresql://user:secret@host/db", "POSTROOM_NATS_URL": "nats://user:secret@host"}


def test_every_setting_says_what_it_does() -> None:
    assert [setting.path for setting in settings(WorkerConfig) if not setting.description] == []


TIMES = {
    f"{config.__name__}.{'.'.join(setting.path)}": (config, setting.path)
    for config in (WorkerConfig, ConsumerConfig, AgentConfig, BrokerConfig)
    for setting in settings(config)
    if setting.path[-1].endswith(("_days", "_seconds"))
}


@pytest.mark.parametrize(("config", "path"), TIMES.values(), ids=TIMES)
def test_no_time_is_longer_than_can_be_reckoned_with(config: type[msgspec.Struct], path: tuple[str, ...]) -> None:
    tree: Any = 10**12
    for name in reversed(path):
        tree = {name: tree}
    with pytest.raises(msgspec.ValidationError, match=r"Expected `\w+` <= \d+"):
        msgspec.convert(tree, config)


def test_a_worker_needs_only_its_two_servers_by_the_variables_that_every_verb_reads() -> None:
    config = load_config(None, ENVIRON)
    assert (config.database_url, config.nats.url) == tuple(ENVIRON.values())


def test_its_own_variables_and_its_file_win_over_those_that_every_verb_reads(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('database_url = "postgresql://file"\n[nats]\nurl = "nats://file"\n')
    config = load_config(file, {**ENVIRON, "POSTROOM_WORKER_NATS_URL": "nats://own"})
    assert (config.database_url, config.nats.url) == ("postgresql://file", "nats://own")


def test_the_urls_are_secrets() -> None:
    shown = {setting.path: value for setting, value in effective(load_config(None, ENVIRON))}
    assert (shown[("database_url",)], shown[("nats", "url")]) == (MASK, MASK)


def test_what_may_have_to_be_published_again_must_be_kept() -> None:
    with pytest.raises(Fatal, match=r"record\.keep_days \(3\) is shorter than record\.horizon_days \(7\)") as refused:
        load_config(None, {**ENVIRON, "POSTROOM_WORKER_RECORD_KEEP_DAYS": "3"})
    assert refused.value.exit_code == Exit.CONFIG


def test_what_may_be_published_again_must_be_remembered_by_webhooks() -> None:
    longer = {"POSTROOM_WORKER_RECORD_HORIZON_DAYS": "8"}
    with pytest.raises(Fatal, match=r"webhooks\.inbox\.horizon_days \(7\) is shorter than record\.horizon_days \(8\)"):
        load_config(None, {**ENVIRON, **longer})
    assert load_config(None, {**ENVIRON, **longer, "POSTROOM_WORKER_WEBHOOKS_INBOX_HORIZON_DAYS": "8"})


CONSUMER = '[[consumers]]\ncontext = "demo"\nconsumer.stream = "S"\nconsumer.durable = "c"\nhandler.url = "http://h/"\n'
AGENT = '[[agents]]\ntenant = "demo"\n'
DATABASE = 'database_url = "postgresql://here"\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"database_url is not set"),
        (f'flows = ["a:b"]\n{CONSUMER}', r"database_url is not set"),
        (CONSUMER, r"consumers\[0\]\.database_url is not set, and neither is database_url"),
        (CONSUMER.replace("demo", "cmd"), r"consumers\[0\]\.context: Expected a name: .*; not `cmd`"),
        (AGENT, r"agents\[0\]\.agent_class is not set"),
        (DATABASE + CONSUMER + CONSUMER, "two have the same consumer.durable"),
        (DATABASE + CONSUMER + "handler.timeout_seconds = 60\n", r"consumer\.ack_wait_seconds"),
        (f'{AGENT}agent_class = "a:B"\nagent.keep_days = 1\n', r"agent\.keep_days \(1\) is shorter"),
        (f'{AGENT}agent_class = "a:B"\nlisten_port = 1\n', "unknown field `listen_port`"),
    ],
)
def test_a_section_that_cannot_run_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    nats = "[nats]\nurl = 'nats://here'\n"
    head, bracket, sections = text.partition("[[")
    file.write_text(head + nats + bracket + sections)
    with pytest.raises(Fatal, match=sentence) as refused:
        load_config(file, {})
    assert refused.value.exit_code == Exit.CONFIG


def test_a_worker_with_only_consumers_or_agents_needs_no_database(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(f'[nats]\nurl = "nats://here"\n{AGENT}agent_class = "a:B"\n')
    assert load_config(file, {}).database_url is None


def test_an_age_is_refused_that_nats_takes_for_no_stream() -> None:
    kinds: tuple[type[KindDefaults | StreamSettings], ...] = (KindDefaults, StreamSettings)
    for kind in kinds:
        usual: dict[str, Any] = {} if kind is KindDefaults else {"name": "SEA_EVENTS", "subjects": ["sea.event.>"]}
        for seconds in (0, 0.1):
            assert msgspec.convert({**usual, "max_age_seconds": seconds}, kind).max_age_seconds == seconds
        with pytest.raises(msgspec.ValidationError, match=r"max_age_seconds must be 0 or at least 0\.1"):
            msgspec.convert({**usual, "max_age_seconds": 0.05}, kind)


def test_a_duplicate_window_is_refused_that_nats_takes_for_no_stream() -> None:
    kinds: tuple[type[StreamDefaults | StreamSettings], ...] = (StreamDefaults, StreamSettings)
    for kind in kinds:
        usual: dict[str, Any] = {} if kind is StreamDefaults else {"name": "SEA_EVENTS", "subjects": ["sea.event.>"]}
        assert msgspec.convert({**usual, "duplicate_window_seconds": 0.1}, kind).duplicate_window_seconds == 0.1
        with pytest.raises(msgspec.ValidationError, match=r"`float` >= 0\.1 .*duplicate_window_seconds"):
            msgspec.convert({**usual, "duplicate_window_seconds": 0.05}, kind)


@pytest.mark.parametrize("half", ["cert_file", "key_file"])
def test_half_of_a_certificate_for_nats_is_refused(half: str, tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(f'[nats]\nurl = "nats://here"\n{half} = "half.pem"\n')
    with pytest.raises(Fatal, match="cert_file and key_file belong together") as refused:
        load_config(file, {})
    assert refused.value.exit_code == Exit.CONFIG
