"""The docs are true: what README and the guides tell people to type is run as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(console|python|http)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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
PAGES = ["README.md", "docs/operations.md", "sdk/README.md"]


def script(page: Path) -> str:
    """Turn a page into a shell script: its `$` lines, its Python examples and its HTTP requests, in order."""
    parts = []
    for language, text in FENCE.findall(page.read_text()):
        if language == "python":
            parts.append(f"python - <<'END'\n{text}END")
        elif language == "http":
            parts.append(f"python exchange.py <<'END'\n{text}END")
        else:
            parts += [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    return "\n".join(parts)


@pytest.fixture
def home(short_directory: Path):
    environment = {
        "HOME": str(short_directory),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
    }
    yield environment
    mailroom = short_directory / "mailroom"
    if mailroom.exists():
        subprocess.run(["postroom", "down", "--state", mailroom, "--wipe", "--yes"], env=environment, check=True)


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_a_page_works_in_the_order_it_stands(name, home):
    commands = script(ROOT / name)
    assert commands
    if "postroom up" not in commands:
        commands = "postroom up --state ~/mailroom --detach\nset -a; . ~/mailroom/env; set +a\n" + commands
    place = Path(home["HOME"]) / "place"
    place.mkdir()
    (place / "exchange.py").write_text(EXCHANGE)
    for file in ("Makefile", ".venv", "requirements.lock", "embedded.lock", "pyproject.toml", "sdk"):
        (place / file).symlink_to(ROOT / file)
    shell = ["bash", "-euo", "pipefail", "-c", commands]
    ran = subprocess.run(shell, cwd=place, env=home, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
