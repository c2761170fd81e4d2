"""Jobs as others do them: `python -m bench.peer_jobs NAME DATABASE_URL COUNT` prints steps a second.

The steps do nothing, and as many run at once as in our worker.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

AT_ONCE: Final = 16  # what our worker runs at once unless it is told otherwise
STEPS: Final = 10  # of a job


def dbos(url: str, count: int) -> float:
    """Run workflows of ten steps each with dbos, from as many threads as run at once."""
    from dbos import DBOS  # noqa: PLC0415 - installed by `make bench` alone

    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR", "sys_db_pool_size": AT_ONCE})
    step = DBOS.step()(lambda: None)

    def run() -> None:
        for _ in range(STEPS):
            step()

    workflow = DBOS.workflow()(run)
    DBOS.launch()
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda _: workflow(), range(AT_ONCE)))  # each thread has its connection now
            began = time.perf_counter()
            list(pool.map(lambda _: workflow(), range(count // STEPS)))
            return count // STEPS * STEPS / (time.perf_counter() - began)
    finally:
        DBOS.destroy()


def procrastinate(url: str, count: int) -> float:
    """Run deferred jobs with procrastinate's own worker."""
    return asyncio.run(_procrastinate(url, count))


async def _procrastinate(url: str, count: int) -> float:
    from procrastinate import App, PsycopgConnector  # noqa: PLC0415 - installed by `make bench` alone

    async def nothing() -> None:
        pass

    app = App(connector=PsycopgConnector(conninfo=url))
    task = app.task(name="nothing")(nothing)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await task.batch_defer_async(*({} for _ in range(count)))
        began = time.perf_counter()
        await app.run_worker_async(wait=False, concurrency=AT_ONCE, install_signal_handlers=False)
        return count / (time.perf_counter() - began)


PEERS: Final[Mapping[str, Callable[[str, int], float]]] = {"dbos": dbos, "procrastinate": procrastinate}

if __name__ == "__main__":
    print(PEERS[sys.argv[1]](sys.argv[2], int(sys.argv[3])))
