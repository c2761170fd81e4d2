"""The Debian packages on a Debian with nothing but systemd: what docs/debian.md says is typed, and leaves nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.container import Machine, booted, host_settings, run
from support.debian import MachineMissing, cached, debian_root, digest
from support.guide import EDITOR, commands
from support.services import Service, start_nats, start_postgres, start_redis

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

TREE = Path(__file__).parents[2]
BARE = ("systemd", "systemd-sysv", "dbus")
FETCHED = "--no-install-recommends python3 libstdc++6"
APT = 'apt() { apt-get --quiet --assume-yes --no-install-recommends "$@"; }'
VARIABLES = {"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
LEFT = "find / -xdev -name '*postroom*' -not -path '/packages*' -not -path '/var/log/*'"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two releases of the last commit, in `1` and `2`: the second one has a higher version."""
    place = tmp_path_factory.mktemp("packages")
    place.chmod(0o755)
    for number in ("1", "2"):
        clone = place / f"clone-{number}"
        subprocess.run(["git", "clone", "--quiet", "--shared", TREE, clone], check=True)
        (clone / ".venv").symlink_to(TREE / ".venv")
        version = f"sed -i -E '/^version|postroom.worker.==/s/([0-9]+\\.){{2}}[0-9]+/&.post{number}/'"
        make = "make --old-file=.venv/.installed release"
        script = f"{version} pyproject.toml sdk/pyproject.toml; {make}"
        subprocess.run(["/bin/sh", "-ec", script], cwd=clone, check=True, capture_output=True)
        (clone / "dist").rename(place / number)
    return place


def bare_root(suite: str) -> Path:
    """A Debian that has fetched its own Python and not installed it: all that the packages may take from elsewhere."""
    try:
        base = debian_root(suite, BARE)
    except MachineMissing as missing:
        pytest.fail(str(missing), pytrace=False)

    def fetch(root: Path) -> None:
        subprocess.run(["cp", "--archive", "--reflink=auto", base, root], check=True)
        script = f"apt-get update -qq; apt-get install -qq --download-only {FETCHED}"
        assert run(root, ["/bin/sh", "-ec", script], host_settings()) == 0, "see above"

    return cached(f"{base.name}-fetched-{digest(FETCHED)}", fetch)


@pytest.fixture(params=["bookworm", "trixie"])
def debian(request: pytest.FixtureRequest, packages: Path, tmp_path: Path) -> Iterator[Machine]:
    """A booted Debian without a network, the packages beside it, and the servers of this checkout's environment."""
    binds = {packages: "/packages", TREE / ".venv": "/opt/servers"}
    log, alone = tmp_path / "console.log", ["--private-network"]
    with booted(bare_root(request.param), host_settings(), binds, log, alone) as machine:
        yield machine


def test_debians_own_checker_finds_no_error(packages: Path) -> None:
    if shutil.which("lintian") is None:
        pytest.fail("this needs one more program: apt-get install lintian", pytrace=False)
    check = ["lintian", "--allow-root", "--fail-on=error", *sorted(packages.glob("1/*.deb"))]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def typed(machine: Machine, release: str, *sections: str) -> str:
    """Type what sections of the page say, in the directory of a release."""
    page = (TREE / "docs/debian.md").read_text().split("\n## ")
    found = [part for name in sections for part in page if part.startswith(f"{name}\n")]
    assert len(found) == len(sections)
    script = [APT, EDITOR, f"cd /packages/{release}", *(line for part in found for line in commands(part))]
    return machine.run("/bin/bash", "-ec", "\n".join(script), environment=VARIABLES)


def test_installed_used_upgraded_and_purged_as_its_page_says(debian: Machine) -> None:
    start_postgres(debian)
    start_redis(debian)
    start_nats(debian)
    debian.run("useradd", "--create-home", "shop")

    assert "\nfirst done\n" in typed(debian, "1", "Broker and worker", "A daemon")
    assert debian.run("postroom", "--version").endswith(".post1\n")
    assert debian.path("/usr/share/man/man1/postroom.1.gz").exists()
    completed = "source /usr/share/bash-completion/completions/postroom; COMP_WORDS=(postroom out); COMP_CWORD=1; "
    completed += '_postroom_completion postroom; echo "${COMPREPLY[*]}"'
    assert debian.run("/bin/bash", "-c", completed) == "outbox\n"
    assert debian.attempt("systemctl", "is-enabled", "postroom-console").stdout == "disabled\n"
    names = ("postroomd@orders", "postroom-broker", "postroom-worker")
    units = [Service(debian, f"{name}.service") for name in names]
    before = [unit.pid for unit in units]
    config = debian.path("/etc/postroom/broker.toml").read_text()

    typed(debian, "2", "Upgrading")
    assert debian.run("postroom", "--version").endswith(".post2\n")
    assert not set(before) & {"0", *(unit.pid for unit in units)}
    assert debian.path("/etc/postroom/broker.toml").read_text() == config
    send = ["runuser", "-u", "shop", "--", "postroom", "send", "queue:work"]
    assert debian.run(*send, "hello", "--id", "first") == "first done (duplicate)\n"
    assert debian.run(*send, "hello", "--id", "second", "--wait") == "second done\n"

    debian.run("find", "/usr/lib/postroom", "-name", "*.pyc", "-delete")
    debian.run("apt-get", "install", "-qq", "--reinstall", "python3-minimal")  # as if Debian had another Python
    assert debian.run("find", "/usr/lib/postroom", "-name", "postroom_server.*.pyc")
    assert [unit.show("ActiveState") for unit in units] == ["active"] * 3

    debian.run("apt-get", "remove", "-qq", "postroom", "postroom-server")
    assert [unit.show("ActiveState") for unit in units] == ["inactive"] * 3
    assert debian.path("/etc/postroom/broker.toml").read_text() == config
    assert debian.path("/var/lib/private/postroom/orders/outbox.db").exists()

    said = typed(debian, "2", "Removing")
    assert "removing /var/lib/private/postroom with what is in it: orders" in said
    assert debian.run("/bin/sh", "-c", LEFT) == ""
    assert debian.attempt("getent", "group", "postroom").stdout == ""
    assert debian.attempt("getent", "passwd", "postroom-pipeline").stdout == ""
