"""`postroom install-service`: what it would write and what it refuses; `make test-systemd` tries the units."""

from pathlib import Path

import pytest
from support.small_disk import run_on_a_small_disk
from typer.testing import CliRunner

from cli import service
from postroom.chassis.exits import Exit, Fatal

UNITS = Path(__file__).parents[3] / "systemd"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An installation: a program, and the units that came with it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/postroom").touch()
    (tmp_path / "share/postroom").mkdir(parents=True)
    (tmp_path / "share/postroom/systemd").symlink_to(UNITS)
    return tmp_path


@pytest.mark.parametrize("scope", [service.SYSTEM, service.user_scope({"XDG_CONFIG_HOME": "/nowhere"})])
def test_every_unit_starts_the_program_where_it_is_installed(prefix: Path, scope: service.Scope) -> None:
    texts = [text for _, text in service.rendered(scope, prefix)]
    assert "".join(texts).count(f"ExecStart={prefix}/bin/postroom ") == sum("ExecStart=" in text for text in texts) > 0
    assert "/opt/postroom" not in "".join(texts)


def test_every_unit_of_the_tree_is_installed_by_one_of_the_scopes() -> None:
    there = {
        str(path.relative_to(UNITS)) for path in UNITS.rglob("*") if path.is_file() and "examples" not in path.parts
    }
    assert there == {*service.SYSTEM.targets, *service.user_scope().targets}


def test_a_users_units_lie_below_the_users_config(prefix: Path) -> None:
    scope = service.user_scope({"XDG_CONFIG_HOME": "/home/ada/cfg"})
    assert {path.parent for path, _ in service.rendered(scope, prefix)} == {Path("/home/ada/cfg/systemd/user")}
    assert "write /home/ada/cfg/postroom/mesh/orders.toml" in scope.next_steps


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("/opt/post room/bin/postroom", '"/opt/post room/bin/postroom"'),
        ("/opt/100%/bin/postroom", "/opt/100%%/bin/postroom"),
        ("/opt/$a/bin/postroom", "/opt/$a/bin/postroom"),
    ],
)
def test_a_path_that_systemd_would_misread_is_escaped(path: str, written: str) -> None:
    assert service.escaped(Path(path)) == written


@pytest.mark.parametrize("name", ["o'brien", 'a"b', "a\\b", "a\tb", "a\nb"])
def test_a_path_that_systemd_starts_in_no_form_is_refused(name: str) -> None:
    with pytest.raises(Fatal, match="systemd starts no program whose path has a quote") as refused:
        service.escaped(Path("/opt") / name / "bin/postroom")
    assert refused.value.exit_code == Exit.CONFIG


@pytest.mark.parametrize("path", ["/root/postroom", "/home/ada/venv", "/run/user/1000/venv"])
def test_a_program_that_services_cannot_see_is_refused(path: str) -> None:
    with pytest.raises(Fatal, match=r"services can't see .*/opt/postroom") as refused:
        service.check_reachable(Path(path))
    assert refused.value.exit_code == Exit.CONFIG


def test_a_program_behind_a_closed_directory_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "venv").mkdir(parents=True)
    closed.chmod(0o700)
    with pytest.raises(Fatal, match=f"can't enter {tmp_path}"):
        service.check_reachable(closed / "venv")


def test_an_installation_without_its_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match=r"there is no .*bin/postroom"):
        list(service.rendered(service.SYSTEM, tmp_path))


def test_an_installation_without_its_units_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/postroom").touch()
    with pytest.raises(Fatal, match="install Postroom again"):
        list(service.rendered(service.SYSTEM, tmp_path))


def test_files_are_replaced_whole_and_readable_by_all(tmp_path: Path) -> None:
    unit = tmp_path / "system/postroomd@.service"
    service.write({unit: "old"})
    service.write({unit: "new"})
    assert unit.read_text() == "new"
    assert unit.stat().st_mode & 0o777 == 0o644
    assert list(unit.parent.iterdir()) == [unit]


FULL_DISK = """
import sys
from pathlib import Path
from cli import service
from cli.main import ending

units = Path(sys.argv[1], "user")
try:
    service.write({units / "first.service": "a" * 512, units / "second.service": "b" * (1 << 21)})
except OSError as error:
    print(ending(error).sentence, [file.name for file in units.iterdir()])
"""


async def test_a_full_disk_is_said_to_be_one_and_leaves_no_half_of_a_unit(tmp_path: Path) -> None:
    said = await run_on_a_small_disk(tmp_path, FULL_DISK)
    assert said[-1] == f"{tmp_path}/user/second.service: No space left on device ['first.service']"


def test_a_command_that_fails_is_named_with_what_it_said() -> None:
    with pytest.raises(Fatal, match=r"`ls /nowhere/at/all` failed: .*No such file") as failed:
        service.run([("ls", "/nowhere/at/all")])
    assert failed.value.exit_code == Exit.UNAVAILABLE


def test_a_dry_run_prints_the_units_and_writes_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(service.app, ["--user", "--dry-run"], env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert done.exit_code == 0
    assert f"# {tmp_path}/systemd/user/postroomd@.socket" in done.output
    assert "# run: systemctl --user daemon-reload" in done.output
    assert not list(tmp_path.iterdir())


def test_what_the_debian_package_installed_is_not_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", "/usr/lib/postroom")
    done = CliRunner().invoke(service.app, ["--user"])
    assert isinstance(done.exception, Fatal)
    assert "the package has installed the units already" in str(done.exception)


def test_both_scopes_at_once_are_a_usage_error() -> None:
    assert CliRunner().invoke(service.app, ["--user", "--system"]).exit_code == Exit.USAGE
