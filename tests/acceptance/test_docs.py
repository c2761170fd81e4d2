"""The docs are true: what README and the guides tell people to type is run as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.class_data import java_home, quick_spark

from cli.stack import choose_port

ROOT = Path(__file__).parents[2]
PART = re.compile(
    r"^```(?P<language>console|python|http|sql|toml)\n(?P<text>.*?)^```$|^<!-- until (?P<until>.*?) -->$",
    re.MULTILINE | re.DOTALL,
)
NAMED = re.compile(r"# (?P<name>\w+\.(?:py|toml))\n")  # the first line of an example that is a file
PORT = "8000"  # of the examples' handlers; another one may be free
PROGRAMS = {"python": "-", "http": "exchange.py", "sql": "execute.py"}  # what runs an example in a language
CONSOLE_PORT = "7480"  # the same
FIRST = "README.md"
ALONE = (
    FIRST,
    *(f"docs/{name}.md" for name in ("tutorial", "operations", "backup", "delivery", "pipelines", "tracing")),
)
TOGETHER = ("sdk/README.md", *(f"docs/{name}.md" for name in ("applications", "jobs", "console", "testing", "spark")))
ROOMS = [*((page,) for page in ALONE), TOGETHER]  # pages that are read in one mail room, one after the other
EXCHANGE = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(os.environ["POSTROOM_SOCKET"])
    head, _, body = sys.stdin.read().partition("\\n\\n")
    connection.sendall(("\\r\\n".join(head.strip().splitlines()) + "\\r\\n\\r\\n" + body.strip()).encode())
    answer = connection.recv(65536).decode()
print(answer)
sys.exit(not answer.startswith("HTTP/1.1 2"))
"""
EXECUTE = """
import asyncio, asyncpg, os, sys
async def execute():
    connection = await asyncpg.connect(os.environ["POSTROOM_DATABASE_URL"])
    await connection.execute(sys.stdin.read())
    await connection.close()
asyncio.run(execute())
"""
BEGINNING = """
exec 2>&1
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
last=${EPOCHREALTIME/[.,]/}
: > "$HOME/laps"
lap() {  # notes in the file `laps` how many microseconds it is since the lap before, and what took them
    local now=${EPOCHREALTIME/[.,]/}
    echo "$((now - last)) $1" >> "$HOME/laps"
    last=$now
}
until_it_is_so() {
    SECONDS=0
    until eval "$1"; do test $SECONDS -lt 60 || { echo "waited in vain: $1"; exit 1; }; sleep 1; done
}
"""
UP = """
postroom up --state ~/mailroom --detach
set -a; . ~/mailroom/env; set +a
"""


def script(page: Path) -> str:
    """Turn a page into a shell script, in order.

    It types the `$` lines, saves the examples that begin with a file's name, runs the other ones, and sends the HTTP
    requests. `<!-- until COMMAND -->` waits as a reader does, who takes longer to type.
    """
    return "\n".join(_step(part) for part in PART.finditer(page.read_text()))


def _step(part: re.Match[str]) -> str:
    language, text, until = part["language"], part["text"], part["until"]
    if until is not None:
        return f"until_it_is_so '{until}'\nlap {shlex.quote(f'until {until}')}"
    if named := NAMED.match(text):
        return f"cat > {named['name']} <<'END'\n{text}END"
    if language == "console":
        typed = [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
        return "\n".join(f"{line}\nlap {shlex.quote(line)}" for line in typed)
    if language in PROGRAMS:
        return f"python {PROGRAMS[language]} <<'END'\n{text}END\nlap {shlex.quote(text.splitlines()[0])}"
    raise AssertionError(f"an example in {language} has to begin with the name of its file: {text}")


@pytest.fixture
def home(short_directory: Path):
    environment = {
        "HOME": str(short_directory),
        "XDG_STATE_HOME": str(short_directory / "state"),  # root's would outlive the test
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "JAVA_TOOL_OPTIONS": os.environ["JAVA_TOOL_OPTIONS"],
    }
    yield environment
    mailroom = short_directory / "mailroom"
    if mailroom.exists():
        subprocess.run(["postroom", "down", "--state", mailroom, "--wipe", "--yes"], env=environment, check=True)


@pytest.mark.timeout(1800)  # the page on pipelines starts Spark seven times
@pytest.mark.parametrize("pages", ROOMS, ids=" ".join)
def test_every_command_of_a_page_works_in_the_order_it_stands(pages, home, record_property):
    for number, name in enumerate(pages):
        read(name, Path(home["HOME"]) / f"place-{number}", home, record_property)


def read(name, place, home, record_property):
    """Type what a page says, in an empty directory with what a checkout has."""
    console = str(choose_port())
    commands = script(ROOT / name).replace(PORT, str(choose_port())).replace(CONSOLE_PORT, console)
    assert commands
    place.mkdir()
    (place / "exchange.py").write_text(EXCHANGE)
    (place / "execute.py").write_text(EXECUTE)
    for file in (
        "Makefile",
        ".venv",
        *(lock.name for lock in ROOT.glob("*.lock")),
        "pyproject.toml",
        "sdk",
        "examples",
    ):
        (place / file).symlink_to(ROOT / file)
    typed = BEGINNING + ("" if "postroom up" in commands else UP) + commands
    shell = ["bash", "-euo", "pipefail", "-c", typed]
    environment = home | {"POSTROOM_CONSOLE_LISTEN_PORT": console}
    cache = Path(home["HOME"], ".cache")
    if name == FIRST:  # which compiles the PySpark of its workers itself, as on any machine
        environment["JAVA_HOME"] = str(java_home(cache))
    elif "spark" in commands:
        environment |= quick_spark(cache)
    ran = subprocess.run(shell, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{name}: {ran.stdout}\n{ran.stderr}"
    laps = [line.split(" ", 1) for line in (Path(home["HOME"]) / "laps").read_text().splitlines()]
    longest = sorted(((int(took) / 1e6, what) for took, what in laps), reverse=True)[:3]
    parts = ", ".join(f"{seconds:.1f} s {what}" for seconds, what in longest)
    record_property("measured", f"{name}: {sum(int(took) for took, _ in laps) / 1e6:.0f} s; of these {parts}")
