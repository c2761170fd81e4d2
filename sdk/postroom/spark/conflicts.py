"""What the driver says and writes about rows that were not sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from postroom.errors import Conflict, InvalidMessage, PostroomError
from postroom.spark.options import WritePlan
from postroom.spark.posting import RowProblem
from postroom.spark.rows import key_text

_SHOWN: Final = 20  # rows in an error; the count is always whole


def failure(plan: WritePlan, problems: Sequence[RowProblem]) -> PostroomError:
    """Return the error that ends a write, with the keys of the rows that were not sent."""
    shown = "; ".join(f"{key_text(plan, problem.key)}: {problem.detail}" for problem in problems[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    if all(problem.conflict for problem in problems):
        sentence = f"the id of {_count(problems)} was used before with other content: {shown}{more}"
        return Conflict.of(409, "idempotency_key_reused", f"{sentence}. Every other row was sent")
    return InvalidMessage.of(400, "rows_refused", f"{_count(problems)} not sent: {shown}{more}. Every other row was")


def prepare_directory(option: str, directory: str) -> None:
    """Make the directory that `option` names before a row is sent; raises `InvalidMessage` where that can't be."""
    try:
        system, path = _resolve(directory)
        system.create_dir(path, recursive=True)
    except (OSError, ValueError) as error:
        detail = f"cannot use {directory!r} of the option `{option}`: {error}"
        raise InvalidMessage.of(400, "invalid_option", detail, field=option) from error


def write_problems(plan: WritePlan, directory: str, name: str, problems: Iterable[RowProblem]) -> str:
    """Write `<directory>/<name>.jsonl`, one object a row; return its path. A second write replaces it."""
    system, path = _resolve(directory)
    lines = [msgspec.json.encode(_record(plan, problem)) + b"\n" for problem in problems]
    with system.open_output_stream(f"{path}/{name}.jsonl") as file:
        file.write(b"".join(lines))
    return f"{directory.rstrip('/')}/{name}.jsonl"


def _record(plan: WritePlan, problem: RowProblem) -> dict[str, object]:
    return {
        "key": dict(zip(plan.ids, problem.key, strict=True)) if problem.key else None,
        "client_message_id": problem.client_message_id,
        "code": problem.code,
        "detail": problem.detail,
        "since": problem.since,
        "destination": problem.destination,
    }


def _resolve(directory: str) -> tuple[Any, str]:
    """Return the file system of a path or a URI (`s3://`, `hdfs://`, `file://`), and the path in it."""
    from pyarrow import fs  # noqa: PLC0415 - slow, and only where a file is written

    if "://" in directory:
        system, path = fs.FileSystem.from_uri(directory)
        return system, path
    return fs.LocalFileSystem(), str(Path(directory).absolute())


def _count(problems: Sequence[RowProblem]) -> str:
    return "1 row" if len(problems) == 1 else f"{len(problems)} rows"
