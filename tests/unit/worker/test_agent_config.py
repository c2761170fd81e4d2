"""Where an agent keeps its store, by its config and by its surroundings."""

from pathlib import Path

import pytest

from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.settings import NatsSettings
from postroom.worker.config import AgentConfig, state_directory
from postroom.worker.config import load_agent_config as load_config

NATS = NatsSettings(url="nats://127.0.0.1:4222")
PLAIN = AgentConfig(tenant="demo", nats=NATS)


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"POSTROOM_STATE": "/stack", "XDG_STATE_HOME": "/state"}, "/stack/agents/demo.default.stock"),
        ({"XDG_STATE_HOME": "/state"}, "/state/postroom/agents/demo.default.stock"),
    ],
)
def test_a_store_lies_with_the_stack_that_the_agent_runs_beside(environ: dict[str, str], directory: str):
    assert state_directory(PLAIN, "stock", environ) == Path(directory)


def test_the_config_wins():
    config = AgentConfig(tenant="demo", nats=NATS, state_directory=Path("/mine"))
    assert state_directory(config, "stock", {"POSTROOM_STATE": "/stack"}) == Path("/mine")


def test_without_a_home_the_config_has_to_say_where(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.getuid", lambda: 3_999_999_999)
    with pytest.raises(Fatal, match="HOME is not set"):
        state_directory(PLAIN, "stock", {})


def test_what_may_have_to_be_published_again_must_be_kept():
    environ = {
        "POSTROOM_AGENT_TENANT": "demo",
        "POSTROOM_AGENT_NATS_URL": "nats://here",
        "POSTROOM_AGENT_AGENT_KEEP_DAYS": "6",
    }
    with pytest.raises(Fatal, match=r"agent.keep_days \(6\) is shorter than agent.horizon_days \(7\)"):
        load_config(None, environ=environ)


@pytest.mark.parametrize("option", ["tenant", "workspace"])
def test_an_option_whose_value_is_wrong_is_named(option: str):
    with pytest.raises(Fatal, match=f"^--{option}: Expected a name: ") as refused:
        load_config(None, **{option: "Shop floor"}, environ=SURROUNDINGS)
    assert refused.value.exit_code == Exit.USAGE
    with pytest.raises(Fatal, match=f"^POSTROOM_AGENT_{option.upper()}: {option}: Expected a name: ") as refused:
        load_config(None, environ=SURROUNDINGS | {f"POSTROOM_AGENT_{option.upper()}": "Shop floor"})
    assert refused.value.exit_code == Exit.CONFIG


SURROUNDINGS = {"POSTROOM_NATS_URL": "nats://of-the-stack", "POSTROOM_MESH": "of_the_stack"}


def test_what_the_file_says_wins_over_what_postroom_up_wrote(tmp_path: Path):
    file = tmp_path / "agent.toml"
    file.write_text('tenant = "mine"\n[nats]\nurl = "nats://mine"\n')
    config = load_config(file, environ=SURROUNDINGS)
    assert (config.tenant, config.nats.url) == ("mine", "nats://mine")
    own = {**SURROUNDINGS, "POSTROOM_AGENT_NATS_URL": "nats://of-the-agent"}
    assert load_config(file, tenant="told", environ=own).nats.url == "nats://of-the-agent"
    assert load_config(file, tenant="told", environ=own).tenant == "told"


def test_what_the_file_leaves_out_is_taken_from_what_postroom_up_wrote(tmp_path: Path):
    file = tmp_path / "agent.toml"
    file.write_text("max_deliver = 7\n")
    for config in (load_config(file, environ=SURROUNDINGS), load_config(None, environ=SURROUNDINGS)):
        assert (config.tenant, config.nats.url) == ("of_the_stack", "nats://of-the-stack")
