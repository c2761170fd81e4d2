"""Whatever is damaged, what was written is saved, or said to be missing: never lost in silence."""

from pathlib import Path
from random import Random

import pytest
from support.damaged_outboxes import PAGE, after, at_random, filled, overwrite, reckon, written


async def test_each_page_in_turn(tmp_path: Path) -> None:
    files = await filled(tmp_path, 45, logged=False)
    before = written(files)
    lost = 0
    for start in range(0, len(files[""]), PAGE):
        code, recovery, rows = after(files, overwrite("", start, b"\xa5" * PAGE))
        reckon(before, code, recovery, rows)
        lost += recovery.missing or 0
    assert lost


@pytest.mark.parametrize("logged", [False, True], ids=["in the file", "in the file and its log"])
async def test_random_bytes(tmp_path: Path, *, logged: bool) -> None:
    files = await filled(tmp_path, 80, logged=logged)
    before = written(files)
    for seed in range(20):
        reckon(before, *after(files, at_random(seed)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_each_page_of_2_mb_in_turn_and_200_random_damages(tmp_path: Path) -> None:
    (tmp_path / "logged").mkdir()
    files = await filled(tmp_path, 1600, logged=False)
    before = written(files)
    assert len(files[""]) > 2_000_000
    damages = missing = 0
    for start in range(0, len(files[""]), PAGE):
        content = Random(start).choice([b"\xa5" * PAGE, bytes(PAGE), Random(start).randbytes(PAGE)])
        code, recovery, rows = after(files, overwrite("", start, content))
        reckon(before, code, recovery, rows)
        damages, missing = damages + 1, missing + (recovery.missing or 0)
    print(f"{len(before)} rows, {damages} pages damaged in turn, {missing} rows missing in all")  # noqa: T201
    logged = await filled(tmp_path / "logged", 300, logged=True)
    for some in (files, logged):
        before = written(some)
        for seed in range(1000, 1200):
            reckon(before, *after(some, at_random(seed)))
