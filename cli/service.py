"""`postroom install-service`: writes the systemd units for where this program is installed, and says what to do next.

The units come with the program, below `<prefix>/share/postroom/systemd`, and name it `/opt/postroom/bin/postroom`; what
is written names the program that writes it. Nothing is started: that needs a config first.
"""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from cli.noun import DryRun, noun
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import replace_private

app = noun()

_PROGRAM: Final = "/opt/postroom/bin/postroom"  # as the units that come with the program call it
_PACKAGED: Final = Path("/usr/lib/postroom")  # where the Debian package has the program
_HIDDEN: Final = (Path("/home"), Path("/root"), Path("/run/user"))  # ProtectHome= hides these from a system service


class Scope(NamedTuple):
    """One of the two ways to install: where each of our files goes, what is run afterwards, what is left to do."""

    targets: Mapping[str, Path]
    commands: Sequence[Sequence[str]]
    next_steps: str


SYSTEM: Final = Scope(
    targets=dict.fromkeys(
        (
            *("postroomd@.service", "postroomd@.socket", "postroom-broker.service", "postroom-console.service"),
            *("postroom-worker.service", "postroom-consumer@.service", "postroom-agent@.service"),
            *("postroom-pipeline@.service", "postroom-pipeline@.timer"),
        ),
        Path("/etc/systemd/system"),
    )
    | {
        f"{kind}.d/{name}.conf": Path(f"/etc/{kind}.d")
        for kind in ("sysusers", "tmpfiles")
        for name in ("postroom", "postroom-server")
    },
    commands=(
        ("systemd-sysusers", "postroom.conf", "postroom-server.conf"),
        ("systemd-tmpfiles", "--create", "postroom.conf", "postroom-server.conf"),
        ("systemctl", "daemon-reload"),
    ),
    next_steps="""\
Next, for each mesh (here: orders):
  1. write /etc/postroom/mesh/orders.toml; {examples}/mesh.toml shows how
  2. put the member's token into /etc/postroom/mesh/orders.token, mode 0600
  3. systemctl enable --now postroomd@orders
  4. add the users who may send to the group: usermod -aG postroom USER
For a broker on this machine: write /etc/postroom/broker.toml ({examples}/broker.toml shows how) and
/etc/postroom/broker-admin.token, mode 0600 each; then systemctl enable --now postroom-broker
For a worker, which publishes what brokers accept: write /etc/postroom/worker.toml, mode 0600 ({examples}/worker.toml
shows how); then systemctl enable --now postroom-worker
For a console, a page for operators: write /etc/postroom/console.toml ({examples}/console.toml shows how); then
systemctl enable --now postroom-console
For a consumer (here: billing): write /etc/postroom/consumer/billing.toml, mode 0600 ({examples}/consumer.toml shows
how); then systemctl enable --now postroom-consumer@billing
For an agent (here: counter): write /etc/postroom/agent/counter.toml, mode 0600 ({examples}/agent.toml shows how), with
a class that this environment can import; then systemctl enable --now postroom-agent@counter
For a pipeline that runs every night (here: audit-log): write /etc/postroom/pipeline/audit-log.env, mode 0600
({examples}/pipeline.env shows how); then systemctl enable --now postroom-pipeline@audit-log.timer""",
)


def user_scope(environ: Mapping[str, str] = os.environ) -> Scope:
    """Return the scope of this user's own service manager, whose files lie below `$XDG_CONFIG_HOME`."""
    config = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    units = config / "systemd/user"
    return Scope(
        targets={"user/postroomd@.service": units, "user/postroomd@.socket": units},
        commands=(("systemctl", "--user", "daemon-reload"),),
        next_steps=f"""\
Next, for each mesh (here: orders):
  1. write {config}/postroom/mesh/orders.toml; {{examples}}/mesh.toml shows how
  2. put the member's token into the file that it names, mode 0600
  3. systemctl --user enable --now postroomd@orders
To have it run while you are logged out: loginctl enable-linger""",
    )


@app.command()
def install_service(
    *,
    user: Annotated[bool, typer.Option("--user", help="For this user alone [default, unless root].")] = False,
    system: Annotated[bool, typer.Option("--system", help="For the whole machine [default for root].")] = False,
    dry_run: DryRun = False,
) -> None:
    """Write the systemd units for this installation, and show what to do next; nothing is started."""
    if user and system:
        raise typer.BadParameter("--user and --system cannot be used together: omit one")
    for_system = system or (not user and os.geteuid() == 0)
    scope = SYSTEM if for_system else user_scope()
    prefix = Path(sys.prefix)
    if prefix == _PACKAGED:
        raise Fatal(Exit.CONFIG, "the package has installed the units already: `systemctl enable --now postroomd@MESH`")
    if for_system:
        check_reachable(prefix, Path(sys.executable).resolve())
    files = dict(rendered(scope, prefix))
    if dry_run:
        for path, text in files.items():
            typer.echo(f"# {path}\n{text}")
        for command in scope.commands:
            typer.echo(f"# run: {' '.join(command)}")
        return
    if shutil.which("systemctl") is None:
        raise Fatal(Exit.UNAVAILABLE, "there is no systemctl on this machine: start `postroom daemon run` yourself")
    if for_system and os.geteuid() != 0:
        raise Fatal(Exit.NOT_PERMITTED, "only root installs system units: run it as root, or use --user")
    write(files)
    run(scope.commands)
    typer.echo(scope.next_steps.format(examples=units_of(prefix) / "examples"))


def check_reachable(*paths: Path) -> None:
    """Raise `Fatal` where a service of the system could not start the program from here."""
    elsewhere = "elsewhere, for instance in /opt/postroom (docs/install.md)"
    for path in paths:
        if any(path.is_relative_to(hidden) for hidden in _HIDDEN):
            raise Fatal(Exit.CONFIG, f"services can't see {path}: install Postroom and its Python {elsewhere}")
        for part in (path, *path.parents):
            if not part.stat().st_mode & stat.S_IXOTH:
                raise Fatal(Exit.CONFIG, f"services can't enter {part}: let others in, or install Postroom {elsewhere}")


def rendered(scope: Scope, prefix: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of the scope and its text, with the program where it is installed."""
    program = prefix / "bin/postroom"
    if not program.exists():
        raise Fatal(Exit.CONFIG, f"there is no {program}: install Postroom into an environment of its own first")
    for name, directory in scope.targets.items():
        source = units_of(prefix) / name
        if not source.exists():
            raise Fatal(Exit.CONFIG, f"{source} is missing: install Postroom again")
        yield directory / source.name, source.read_text("utf-8").replace(_PROGRAM, escaped(program))


def units_of(prefix: Path) -> Path:
    """Return where an installation keeps its units."""
    return prefix / "share/postroom/systemd"


def escaped(program: Path) -> str:
    """Write the path of a program as `ExecStart=` wants it; raises `Fatal` for one that systemd starts in no form.

    A specifier is doubled, but no `$`: the program itself is never a variable.
    """
    text = str(program)
    if any(character in "'\"\\" or not character.isprintable() for character in text):
        detail = f"systemd starts no program whose path has a quote, a backslash or a control character, as {text!r}"
        raise Fatal(Exit.CONFIG, f"{detail}: install Postroom elsewhere")
    text = text.replace("%", "%%")
    return f'"{text}"' if any(character.isspace() for character in text) else text


def write(files: Mapping[Path, str]) -> None:
    """Write each file whole or not at all, readable by all, and say so."""
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_private(path, text)
        path.chmod(0o644)
        typer.echo(f"wrote {path}")


def run(commands: Sequence[Sequence[str]]) -> None:
    """Run each command; where one fails, raise `Fatal` that says what it said."""
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a literal above
        if done.returncode != 0:
            said = done.stderr.strip() or f"exit code {done.returncode}"
            raise Fatal(Exit.UNAVAILABLE, f"the units are written, but `{' '.join(command)}` failed: {said}")
