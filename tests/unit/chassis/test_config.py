from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from postroom._wire.names import WORD
from postroom.chassis.config import MASK, SECRET, effective, load, settings
from postroom.chassis.exits import Exit, Fatal


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    depth: Annotated[int, msgspec.Meta(ge=1, le=64, description="How deep.")] = 8
    names: list[str] = []
    port: Annotated[int, msgspec.Meta(ge=1)] | None = None
    odds: list[int] = []


class Config(msgspec.Struct, forbid_unknown_fields=True):
    mesh: Annotated[str, msgspec.Meta(pattern=WORD.schema)]
    state: Path = Path("state")
    password: Annotated[str, SECRET] = ""
    limits: Limits = msgspec.field(default_factory=Limits)


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return file


def refusal(file: Path | None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(Fatal) as refused:
        load(Config, file, prefix="P_", environ=environ or {}, shared={"ALL_MESH": "MESH"})
    assert refused.value.exit_code is Exit.CONFIG
    return str(refused.value)


def test_a_file_is_decoded_into_the_types_and_paths_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = load(Config, write(tmp_path, 'mesh = "sea"\nstate = "~/x"\n[limits]\ndepth = 3'), prefix="P_", environ={})
    assert config == Config(mesh="sea", state=Path("/home/ada/x"), limits=Limits(depth=3))


def test_a_doubled_dollar_sign_in_a_path_is_one_and_begins_no_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    config = load(Config, write(tmp_path, 'mesh = "sea"\nstate = "$HOME/$$HOME"'), prefix="P_", environ={})
    assert config.state == Path("/home/ada/$HOME")


def test_a_path_stays_where_it_was_though_users_code_changes_the_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(Config, None, prefix="P_", environ={"P_MESH": "sea", "P_STATE": "state"})
    monkeypatch.chdir("/")
    assert config.state.absolute() == tmp_path / "state"


def test_the_environment_overrides_the_file_down_to_nested_settings_and_lists(tmp_path):
    environ = {"P_LIMITS_DEPTH": "5", "P_LIMITS_NAMES": "a, b", "P_MESH": "lake"}
    config = load(Config, write(tmp_path, 'mesh = "sea"'), prefix="P_", environ=environ)
    assert config == Config(mesh="lake", limits=Limits(depth=5, names=["a", "b"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "mesh"),
        ('mesh = "sea"\nmehs = 1', "`mehs`"),
        ("mesh = 3", "mesh: Expected `str`"),
        ('mesh = "Sea"', "mesh: Expected a name: a lower-case letter"),
        ('mesh = "sea"\n[limits]\ndepth = 65', "limits.depth: Expected `int` <= 64"),
        ('mesh = "sea"\n[limits]\ndepht = 6', "limits: unknown field `depht`; did you mean `depth`?"),
        ('mesh = "sea"\n[limits]\ndepth = "6"', "limits.depth: Expected `int`, got `str`"),
        ('mesh = "sea"\nlimits = 3', "limits: Expected"),
        ('mesh = "sea"\n[limits]\n[limits]', "is not TOML"),
        ('mesh = "sea"\nstate = 4', "state"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_path(tmp_path, text, said):
    assert said in refusal(write(tmp_path, text))


def test_without_a_file_it_says_that_none_was_read_and_what_to_do():
    said = refusal(None)
    assert "no config file was given" in said
    assert "--config FILE" in said
    assert "P_MESH" in said


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert "No such file" in refusal(tmp_path / "absent.toml")
    assert "Is a directory" in refusal(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'mesh = "\xff"')
    assert "is not TOML" in refusal(tmp_path / "latin.toml")
    assert "it has more than 16777216 bytes" in refusal(Path("/dev/zero"))


def test_a_byte_order_mark_and_line_ends_of_windows_are_read_over(tmp_path):
    (tmp_path / "windows.toml").write_bytes(b'\xef\xbb\xbfmesh = "sea"\r\n[limits]\r\ndepth = 3\r\n')
    config = load(Config, tmp_path / "windows.toml", prefix="P_", environ={})
    assert (config.mesh, config.limits.depth) == ("sea", 3)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("P_LIMITS_DEPTH", "deep", "limits.depth: Expected `int`"),
        ("P_LIMITS_DEPTH", "65", "limits.depth: Expected `int` <= 64"),
        ("P_LIMITS_PORT", "0", "limits.port: Expected `int` >= 1"),
        ("P_LIMITS_ODDS", "1, two", "limits.odds[1]: Expected `int`"),
        ("P_STATE", "", "state: Expected a path"),
        ("ALL_MESH", "Sea", "mesh: Expected a name"),
    ],
)
def test_a_variable_that_is_wrong_is_named_in_place_of_the_file(tmp_path, variable, value, said):
    file = write(tmp_path, "[limits]\ndepth = 3")
    assert refusal(file, {variable: value}).startswith(f"{variable}: {said}")


def test_a_value_in_the_file_that_is_wrong_beside_a_variable_is_the_files(tmp_path):
    file = write(tmp_path, 'mesh = "sea"\n[limits]\ndepth = 65')
    assert refusal(file, {"P_MESH": "lake"}).startswith(f"{file}: limits.depth: ")


def test_a_variable_below_a_value_that_is_no_table_leaves_the_file_to_be_refused(tmp_path):
    assert "limits" in refusal(write(tmp_path, 'mesh = "sea"\nlimits = "x"'), {"P_LIMITS_DEPTH": "3"})


def test_the_effective_config_masks_secrets_and_lists_every_leaf():
    shown = {".".join(setting.path): value for setting, value in effective(Config(mesh="sea", password="hush"))}
    limits = {"limits.depth": 8, "limits.names": [], "limits.port": None, "limits.odds": []}
    assert shown == {"mesh": "sea", "state": Path("state"), "password": MASK, **limits}


def test_settings_know_their_variable_and_description():
    depth = {setting.path: setting for setting in settings(Config)}["limits", "depth"]
    assert (depth.variable("P_"), depth.description, depth.default) == ("P_LIMITS_DEPTH", "How deep.", 8)


class Remote(msgspec.Struct, forbid_unknown_fields=True):
    url: Annotated[str, msgspec.Meta(description="Where.")]
    seconds: float = 5.0


class Optional(msgspec.Struct, forbid_unknown_fields=True):
    remote: Remote | None = None


def test_a_section_may_be_left_out_and_is_set_by_its_variables():
    assert load(Optional, None, prefix="P_", environ={}).remote is None
    environ = {"P_REMOTE_URL": "nats://x", "P_REMOTE_SECONDS": "2"}
    assert load(Optional, None, prefix="P_", environ=environ).remote == Remote("nats://x", 2.0)


def test_a_section_that_is_left_out_is_shown_without_values():
    assert [(setting.path, setting.default) for setting in settings(Optional)] == [
        (("remote", "url"), None),
        (("remote", "seconds"), 5.0),
    ]
    assert [value for _, value in effective(Optional())] == [None, None]
    assert [value for _, value in effective(Optional(Remote("nats://x")))] == ["nats://x", 5.0]


@pytest.mark.parametrize("misspelt", ["P_PASWORD", "P_LIMITS_DEPHT", "P_LIMITS_NAME"])
def test_a_misspelt_variable_is_refused_with_the_one_that_is_meant(tmp_path, misspelt):
    said = refusal(write(tmp_path, 'mesh = "sea"'), {misspelt: "1"})
    assert misspelt in said
    assert "did you mean P_" in said


@pytest.mark.parametrize("foreign", ["P_PORT_80_TCP_ADDR", "P_SERVICE_HOST", "P_URL", "OTHER_MESH"])
def test_a_variable_that_resembles_no_setting_is_somebody_elses(tmp_path, foreign):
    assert load(Config, write(tmp_path, 'mesh = "sea"'), prefix="P_", environ={foreign: "1"}).mesh == "sea"


@pytest.mark.parametrize("path", ["~nobody-has-this-name/x", "a\\u0000b"])
def test_a_path_that_leads_nowhere_is_refused_with_its_key(tmp_path, path):
    assert "state: Expected a path" in refusal(write(tmp_path, f'mesh = "sea"\nstate = "{path}"'))


def test_an_empty_path_is_refused_instead_of_meaning_the_working_directory(tmp_path):
    assert "state: " in refusal(write(tmp_path, 'mesh = "sea"\nstate = ""'))
    assert "state: " in refusal(write(tmp_path, 'mesh = "sea"'), {"P_STATE": ""})
