"""`make release`: the same bytes from every clone of a commit, whole metadata, and a page that needs no repository."""

from __future__ import annotations

import email
import hashlib
import re
import runpy
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
RELATIVE = re.compile(r"\]\((?!https?:|#)")
ELSEWHERE = {"TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7", "HOME": "/nonexistent", "COLUMNS": "40"}


def made(target: str, place: Path, umask: int = 0o022) -> Path:
    """Clone the last commit, make what its users install there, and return its `dist/`."""
    subprocess.run(["git", "clone", "--quiet", "--shared", REPOSITORY, place], check=True)
    (place / ".venv").symlink_to(REPOSITORY / ".venv")
    make = ["make", "--old-file=.venv/.installed", target]  # never installs the clone into this environment
    subprocess.run(make, cwd=place, check=True, capture_output=True, umask=umask)
    return place / "dist"


def sums(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("wheels", tmp_path_factory.mktemp("release") / "clone")


@pytest.fixture(scope="module")
def metadata(release: Path) -> dict[str, Message]:
    """What each wheel says of itself, by the name of its distribution."""
    found = {}
    for wheel in release.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            said = email.message_from_bytes(archive.read(name))
        found[said["Name"]] = said
    assert set(found) == {"postroom", "postroom-server"}
    return found


def test_a_commit_built_again_elsewhere_gives_the_same_bytes(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ELSEWHERE.items():
        monkeypatch.setenv(name, value)
    assert sums(made("wheels", tmp_path / "another place", umask=0o077)) == sums(release)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_whole_release_is_the_same_bytes_too(release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made("release", tmp_path / "first")
    for name, value in ELSEWHERE.items():
        monkeypatch.setenv(name, value)
    assert sums(made("release", tmp_path / "another place", umask=0o077)) == sums(first)
    listed = dict(reversed(line.split("  ")) for line in (first / "SHA256SUMS").read_text().splitlines())
    (version,) = {name.split("-")[1] for name in sums(release) if name.endswith(".whl")}
    machine = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
    debian = {f"postroom_{version}-1_{machine}.deb", f"postroom-server_{version}-1_all.deb"}
    assert set(listed) == {*sums(release), *debian}
    assert listed.items() <= sums(first).items()


@pytest.mark.parametrize("name", ["postroom", "postroom-server"])
def test_each_distribution_says_whose_it_is_and_where_it_runs(metadata: dict[str, Message], name: str) -> None:
    said = metadata[name]
    assert said["Author"] == "The Postroom authors"
    assert said["License-Expression"] == "Apache-2.0"
    assert said["License-File"] == "LICENSE"
    pythons = [each for each in said.get_all("Classifier", ()) if re.search(r":: 3\.\d+$", each)]
    assert pythons == [f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)]
    assert said["Requires-Python"] == ">=3.11"


@pytest.mark.parametrize("name", ["postroom", "postroom-server"])
def test_the_page_of_an_index_has_no_link_into_the_repository(metadata: dict[str, Message], name: str) -> None:
    said = metadata[name]
    assert said["Description-Content-Type"] == "text/markdown"
    text = said.get_payload()
    assert isinstance(text, str)
    assert text.startswith("# ")
    assert not RELATIVE.search(text)


def test_the_page_names_the_files_that_the_readme_links_to(release: Path, metadata: dict[str, Message]) -> None:
    text = metadata["postroom-server"].get_payload()
    assert isinstance(text, str)
    named = {name for name in re.findall(r"`([\w/.-]+\.md)`", text) if not name.startswith("/")}
    assert len(named) > 10
    (source,) = release.glob("postroom_server-*.tar.gz")
    with tarfile.open(source) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    assert named <= there


@pytest.fixture(scope="module")
def described() -> Callable[[str, str | None], str]:
    found: Callable[[str, str | None], str] = runpy.run_path(str(REPOSITORY / "release/metadata.py"))["described"]
    return found


def test_with_an_address_of_its_files_links_and_pictures_are_absolute(
    described: Callable[[str, str | None], str],
) -> None:
    text = "![Flow](docs/flow.svg) and [roles](docs/security.md#roles), [semver](https://semver.org), [below](#below)"
    assert described(text, "https://files.example.com/v1/") == (
        "![Flow](https://files.example.com/v1/docs/flow.svg) and "
        "[roles](https://files.example.com/v1/docs/security.md#roles), [semver](https://semver.org), [below](#below)"
    )


def test_a_wheel_from_the_source_distribution_is_the_one_that_was_released(release: Path, tmp_path: Path) -> None:
    for source in release.glob("*.tar.gz"):
        with tarfile.open(source) as archive:
            archive.extractall(tmp_path, filter="data")
        place = tmp_path / source.name.removesuffix(".tar.gz")
        build = [REPOSITORY / ".venv/bin/hatchling", "build", "-t", "wheel", "-d", tmp_path / "built"]
        subprocess.run(build, cwd=place, check=True, capture_output=True)
    for wheel in release.glob("*.whl"):
        with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(tmp_path / "built" / wheel.name) as other:
            assert {each: one.read(each) for each in one.namelist()} == {
                each: other.read(each) for each in other.namelist()
            }
