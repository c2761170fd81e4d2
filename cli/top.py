"""`postroom status` and `top`: how an installation is, what is wrong first; again and again, with rates.

The rules are docs/contract/operate.md#operate-61.
"""

import asyncio
import math
import os
import re
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from cli.installation import Place, Sight, look
from cli.noun import BrokerPlace, Json, Socket, noun
from cli.output import can_draw, display_width, line
from cli.screen import Screen, show_status
from cli.up import State
from postroom._wire.programs import Rates
from postroom.chassis.exits import Exit, Fatal

app = noun()
statuses = noun()

_COUNTED: Final = ("queued", "accepted", "published", "handled", "waiting", "dead")
_KEYS: Final = "q quit   o overview   d daemons, brokers, workers   c consumers   h last hour"
_COLOUR: Final = re.compile("\033\\[[0-9;]*m")
_ENTER: Final = "\033[?1049h\033[?25l"  # a screen of its own, without a cursor
_LEAVE: Final = "\033[?25h\033[?1049l"
_CLEAR: Final = "\033[H\033[J"


@statuses.command()
def status(
    *,
    state: State = None,
    socket: Socket = None,
    broker: BrokerPlace,
    hour: Annotated[
        bool, typer.Option("--hour", help="Instead: what happened in each minute of the last hour.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how daemons, brokers, workers and consumers are, what is wrong first, with the command that helps.

    It asks the daemon of this machine, the broker, and what `postroom up` started, as far as there are any; with
    --state what `postroom up` started there alone, whatever the environment says.

    Exit code 69: something does not run or cannot be asked; 1: something else is wrong, or waits for an operator, as
    dead rows and dead letters do; 0: all is well.
    """
    show_status(Place(state, socket, *broker), as_json=as_json, hour=hour)


@app.command()
def top(
    *,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.", metavar="SECONDS")
    ] = 2.0,
    count: Annotated[
        int | None, typer.Option(min=1, help="End after that many looks [default: never].", metavar="N")
    ] = None,
    state: State = None,
    socket: Socket = None,
    broker: BrokerPlace,
) -> None:
    """Watch an installation: rates, what waits, what is wrong; d shows daemons, c consumers, h the last hour, q ends.

    Rates are by the last two reports of each program, which come every ten seconds. Without a terminal it writes a line
    for each look.
    """
    if math.isnan(interval):  # which no bound refuses
        raise Fatal(Exit.USAGE, "--interval is not a number: give seconds, as in 2")
    place, rates, left = Place(state, socket, *broker), Rates(), count
    if not (sys.stdin.isatty() and can_draw(sys.stdout)):
        while left != 0:
            sight = asyncio.run(look(place))
            rates.see(sight.programs)
            line(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}  {summary(sight, rates)}", flush=True)
            left = None if left is None else left - 1
            if left != 0:
                time.sleep(interval)
        return
    view = "o"
    with _own_screen():
        while left != 0:
            sight = asyncio.run(look(place, hour=view == "h"))
            rates.see(sight.programs)
            left = None if left is None else left - 1
            until = time.monotonic() + interval
            while True:
                _draw(sight, rates, view)
                ready, _, _ = select.select([sys.stdin], [], [], max(0.0, until - time.monotonic()))
                if not ready:
                    break
                key = os.read(sys.stdin.fileno(), 1).decode(errors="replace")  # Python's own buffer is not selected
                if key in ("q", ""):
                    return
                before, view = view, key if key in "odch" else view
                if view == "h" != before:  # the hour is asked for only while it is shown
                    sight = asyncio.run(look(place, hour=True))
                    rates.see(sight.programs)


def summary(sight: Sight, rates: Rates) -> str:
    """Say in a line how quickly messages go, what waits and is dead, and how much is wrong."""
    words, dead = [], sum(one.dead or 0 for one in sight.programs) + sum(sight.letters.values())
    for name in _COUNTED:
        rate = rates.of(name)
        said = "-" if rate is None else f"{rate:+.1f}/s" if name in ("waiting", "dead") else f"{rate:.1f}/s"
        now = {"waiting": sum(one.waiting or 0 for one in sight.programs), "dead": dead}.get(name)
        words.append(f"{name} {said}" if now is None else f"{name} {now} ({said})")
    return "  ".join([*words, f"wrong {len(sight.troubles)}"])


def _draw(sight: Sight, rates: Rates, view: str) -> None:
    """Draw one frame: the rates, then what the view is of, as far as there is room."""
    width, height = shutil.get_terminal_size()
    screen = Screen(rows=max(1, height - 6)) if view in "dc" else Screen()
    below = {
        "o": lambda: screen.installation(sight),
        "d": lambda: screen.programs(sight.programs),
        "c": lambda: screen.consumers(sight.consumers),
        "h": lambda: screen.hour(sight),
    }
    head = screen.fold(f"{datetime.now(UTC):%H:%M:%SZ}  {summary(sight, rates)}")
    foot = ["", screen.fold(_KEYS)[0]][-height:]
    frame, room = list[str](), height - len(foot)
    for text in (*head, "", *below[view]()):
        columns = display_width(_COLOUR.sub("", text))
        room -= max(1, math.ceil(columns / width))  # a word that is too long goes on in the next row
        if room < 0:
            break
        frame.append(text)
    sys.stdout.write(_CLEAR + "\n".join([*frame, *foot]))
    sys.stdout.flush()


@contextmanager
def _own_screen() -> Iterator[None]:
    """Use the terminal for keys and frames, and restore it, also while it is stopped; what was typed before counts."""
    before = termios.tcgetattr(sys.stdin)

    def enter() -> None:
        tty.setcbreak(sys.stdin, termios.TCSADRAIN)
        os.write(sys.stdout.fileno(), _ENTER.encode())  # a handler of a signal may not use a buffer that is in use

    def leave() -> None:
        os.write(sys.stdout.fileno(), _LEAVE.encode())
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)

    def stop(*_: object) -> None:
        leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        enter()

    def end(number: int, _: object) -> None:
        leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTSTP, stop)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGQUIT, end)
    enter()
    try:
        yield
    finally:
        leave()
