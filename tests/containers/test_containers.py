"""docs/containers.md with real containers: the image on a bare Debian, the services of compose.yaml, the manifests.

podman builds the image, since a build may use the host's index of packages only through its volumes; a dockerd of the
test's own runs it. The servers' images come from no registry here: an image of Debian's packages has their names and
understands what compose.yaml tells them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.container import host_settings
from support.debian import BARE, MachineMissing, debian_root

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

TREE = Path(__file__).parents[2]
PLACE = TREE / "containers"
TOOLS = TREE / ".venv/containers"  # kubernetes-validate
SERVERS = ("postgresql", "redis-server", "nats-server")
NEEDED = {"podman": "podman", "runc": "runc", "kubectl": "kubernetes-client", "dockerd": "docker.io"}
POSTGRES = r"""
FROM servers
RUN printf '%s\n' \
    '[ -s "$1/PG_VERSION" ] || {' \
    '  echo "$POSTGRES_PASSWORD" > /tmp/password' \
    '  initdb --pgdata "$1" --username "$POSTGRES_USER" --pwfile /tmp/password --auth-host scram-sha-256' \
    '  echo "host all all all scram-sha-256" >> "$1/pg_hba.conf"' \
    '  echo "CREATE DATABASE $POSTGRES_USER" | postgres --single -D "$1" postgres; }' \
    'exec postgres -D "$1" -c listen_addresses="*"' > /start && ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/ \
    && install --directory --owner postgres /var/lib/postgresql/data
USER postgres
ENTRYPOINT ["/bin/sh", "-eu", "/start", "/var/lib/postgresql/data"]
"""
REDIS = 'FROM servers\nUSER redis\nENTRYPOINT ["redis-server", "--protected-mode", "no", "--bind", "0.0.0.0"]\n'
NATS = 'FROM servers\nENTRYPOINT ["nats-server"]\n'

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A shell in containers/ with a dockerd; what that and podman store is in a temporary directory."""
    if missing := sorted(package for tool, package in NEEDED.items() if shutil.which(tool) is None):
        pytest.fail(f"this needs more programs: apt-get install {' '.join(missing)}", pytrace=False)
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
        pytest.fail("this needs Docker's compose: apt-get install docker-compose, 2.26 or newer", pytrace=False)
    place = tmp_path_factory.mktemp("containers")
    (place / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{place}/podman"\nrunroot = "{place}/run"\n'
    )
    socket = place / "socket"
    environment = os.environ | {"CONTAINERS_STORAGE_CONF": f"{place}/storage.conf", "DOCKER_HOST": f"unix://{socket}"}

    def run(command: str, cwd: Path = PLACE) -> str:
        done = subprocess.run(
            ["/bin/sh", "-euc", command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        said = f"{command}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        if done.returncode != 0 and command.startswith("docker compose"):
            said += run("cd . && docker compose --profile '*' logs --tail=20")
        assert done.returncode == 0, said
        return done.stdout

    parts = {"data-root": place / "docker", "exec-root": place / "exec", "pidfile": place / "pid"}
    options = [f"--{name}={path}" for name, path in parts.items()]
    with (
        (place / "dockerd.log").open("w") as log,
        subprocess.Popen(["dockerd", *options, f"--host=unix://{socket}"], stdout=log, stderr=log) as dockerd,
    ):
        try:
            _within(60, lambda: run("docker info"))
            yield run
        finally:
            dockerd.terminate()
            dockerd.wait(60)
            for namespace in filter(os.path.ismount, (place / "exec" / "netns").iterdir()):  # which dockerd leaves
                subprocess.run(["umount", namespace], check=True)
            run("podman system reset --force")


@pytest.fixture(scope="module")
def image(run: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image, built as the page says, on a Debian of debootstrap."""
    run(f"tar --create --directory {_debian('bookworm', BARE)} . | podman import --quiet - base")
    settings, directory = host_settings(), tmp_path_factory.mktemp("pip")
    lines = [
        f"{name.removeprefix('PIP_').lower()} = {value}"
        for name, value in settings.environment.items()
        if name.startswith("PIP_")
    ]
    (directory / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    binds = [f"{directory}/pip.conf:/etc/pip.conf", *(f"{path}:{path}" for path in settings.binds)]
    (command,) = [line for line in _commands() if line.startswith("podman build")]
    options = " ".join(["--network=host", "--build-arg=BASE=base", *(f"--volume={bind}:ro" for bind in binds)])
    run(command.replace("podman build", f"podman build --quiet --runtime=runc {options}"), TREE)
    name = command.split("--tag ")[1].split()[0]
    run(f"podman save localhost/{name} | docker load; docker tag localhost/{name} {name}")
    return name


@pytest.fixture
def installation(run: Run) -> Iterator[None]:
    """The directory of compose.yaml with an `.env`, and images of the servers; afterwards nothing of it is left."""
    run(f"tar --create --directory {_debian('trixie', SERVERS)} . | docker import - servers")
    compose = (PLACE / "compose.yaml").read_text()
    for name, text in {"postgres": POSTGRES, "redis": REDIS, "nats": NATS}.items():
        (tag,) = re.findall(rf"docker\.io/library/{name}:\S+", compose)
        run(f"docker build --quiet --tag {tag} - <<'END'\n{text}\nEND")
    try:
        yield
    finally:
        run("docker compose --profile '*' down --volumes; rm -f .env")


def test_the_image_runs_as_a_user_without_rights_on_a_root_that_nobody_writes(run: Run, image: str) -> None:
    confined = "docker run --rm --read-only --cap-drop=all --security-opt=no-new-privileges"
    assert run(f"{confined} {image} --version").startswith("postroom ")
    assert run(f"{confined} --entrypoint id {image}").startswith("uid=10001(postroom) gid=10001(postroom)")


@pytest.mark.usefixtures("image", "installation")
def test_the_commands_of_the_page_lead_to_a_message_that_is_relayed(run: Run) -> None:
    for command in _commands():
        if command.startswith(("printf", "docker compose")):
            said = run(command.replace("compose exec", "compose exec -T"))
            assert "exec daemon" not in command or "done" in said, said
    # another user, in the socket's group, from a container of its own; kept over a stop of the daemon
    run("docker compose stop broker")
    run(
        "docker run --rm --user 4711:10001 --volume postroom_sockets:/run/postroom postroom:0.2.0 send queue:work later"
    )
    run("docker compose --profile daemon restart daemon; docker compose start broker")
    relayed = "docker compose exec -T daemon postroom outbox list --status done --json"

    def both_relayed() -> None:
        assert len(run(relayed).splitlines()) == 2

    _within(60, both_relayed)
    run("docker compose --profile daemon stop")
    ended = run("docker compose --profile daemon ps --all --format '{{.Service}} {{.ExitCode}}'").splitlines()
    assert {"broker 0", "worker 0", "daemon 0", "migrate 0", "tokens 0"} <= set(ended)


def test_the_manifests_are_what_kubernetes_takes(run: Run, tmp_path: Path) -> None:
    manifests = tmp_path / "manifests.yaml"
    manifests.write_text(run("kubectl kustomize kubernetes"))
    run(f"PYTHONPATH={TOOLS} {sys.executable} -m kubernetes_validate --strict {manifests}")
    wanted = set(re.findall(r"(?:key: |from-\w+=)([a-z]+-(?:url|token))", manifests.read_text()))
    given = set(re.findall(r"--from-\w+=([a-z]+-(?:url|token))=", (TREE / "docs/containers.md").read_text()))
    assert wanted == given


def test_every_variable_is_a_setting() -> None:
    known = (TREE / "docs/configuration.md").read_text()
    files = [PLACE / "compose.yaml", *(PLACE / "kubernetes").glob("*.yaml")]
    for variable in {
        name
        for file in files
        for name in re.findall(r"POSTROOM_(?:DAEMON|BROKER|WORKER|CONSOLE)_\w+", file.read_text())
    }:
        assert variable == "POSTROOM_BROKER_URL" or f"`{variable}`" in known, variable


def _debian(suite: str, packages: tuple[str, ...]) -> Path:
    try:
        return debian_root(suite, packages)
    except MachineMissing as missing:
        pytest.fail(str(missing), pytrace=False)


def _commands() -> list[str]:
    """Return what the page tells to type."""
    blocks = (TREE / "docs/containers.md").read_text().split("```console\n")[1:]
    lines = "".join(block.split("```")[0] for block in blocks).replace("\\\n", "").splitlines()
    return [line.removeprefix("$ ") for line in lines]


def _within(seconds: float, succeed: Callable[[], object]) -> None:
    """Try again and again what may fail at first."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            succeed()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return
