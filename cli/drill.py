"""`postroom drill …`: what an operator hopes never to need, done on a stack of its own.

An older Postgres comes back, then an older outbox; each way back is the one of docs/backup.md, typed as there: nothing
here repairs anything by itself.
"""

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cli.demo import State, perform
from cli.demo.counts import TOPIC, Broker, Count, Outbox, differing
from cli.demo.stage import HandledStack, Receiver, Stage, wait
from cli.noun import noun
from cli.stack import module_command
from embedded.postgres import postgres_home
from postroom import Client, new_id
from postroom._wire.message import SendRequest
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.sqlite import PARTS

app = noun("Rehearse a loss and the way back, on servers of its own.")

FIRST: Final = 1000  # messages before any backup
AFTER_POSTGRES: Final = 500  # accepted and handled after the backup of Postgres
WAITING: Final = 200  # that wait in the outbox when that is backed up
AFTER_OUTBOX: Final = 200  # accepted and handled after the backup of the outbox
UNRELAYED: Final = 100  # acknowledged by the daemon alone when its disk is lost
WHY: Final = "a drill"


@app.callback()
def drill() -> None:
    """Rehearse a loss and the way back, on servers of its own."""


@app.command()
def restore(*, state: State = None) -> None:
    """Put an older Postgres and an older outbox back, recover by the documented commands, and count."""
    perform(state, lambda *given: RestoreDrill(*given).run())


class RestoreDrill:
    """One run on a stack of its own; `run` says whether every number holds."""

    def __init__(self, stack: HandledStack, stage: Stage, receiver: Receiver) -> None:
        self.stack = stack
        self.stage = stage
        self.receiver = receiver
        self._sent: list[SendRequest] = []

    def run(self) -> bool:
        """Do everything, in order; raises `Fatal` where a command fails, or something is waited for in vain."""
        self.stage.act("Start Postgres, Redis, NATS, a broker, a worker, a daemon and a consumer")
        self.stack.start(self.stage.say)
        self._lose_postgres()
        self._lose_the_outbox()
        return self._count()

    def _lose_postgres(self) -> None:
        self.stage.act(f"Send {FIRST:,} messages, and back Postgres up")
        self._send(FIRST)
        self._handle_everything()
        dump = self.stack.layout.state / "postgres.dump"
        self._postgres("pg_dump", "--format=custom", f"--file={dump}", self.stack.postgres.url)
        self.stage.act(f"Send {AFTER_POSTGRES:,} more, and put the older Postgres back")
        self._send(AFTER_POSTGRES)
        self._handle_everything()
        users = (self.stack.consumer, self.stack.worker, self.stack.broker)
        for program in users:
            program.stop()
        self._postgres(
            *("pg_restore", "--clean", "--if-exists", "--single-transaction"),
            *(f"--dbname={self.stack.postgres.url}", str(dump)),
        )
        history = Broker(self.stack.postgres.url).count("history")
        self.stage.say(f"Postgres knows {history:,} of {len(self._sent):,} messages", "red")
        self.stage.act("Get them back, as docs/backup.md says")
        self._type("broker", "restored", "--config", str(self.stack.broker.config_file))
        for program in reversed(users):
            program.start()
        with self._client() as client:
            wait(lambda: client.health().missing == AFTER_POSTGRES, "for the daemon to compare")
        self.stage.say(f"the daemon says that the database lost {AFTER_POSTGRES:,} messages", "red")
        self._type("outbox", "resend", "--missing", "--reason", WHY, "--yes")
        self._handle_everything(again=AFTER_POSTGRES)

    def _lose_the_outbox(self) -> None:
        self.stage.act(f"Send {WAITING:,} while the relay pauses, and back the outbox up while the daemon runs")
        self._type("relay", "pause", "--reason", WHY)
        self._send(WAITING)
        copy = self.stack.layout.state / "outbox.backup"
        self._type("outbox", "backup", str(copy), "--reason", WHY)
        self._type("relay", "resume", "--reason", WHY)
        self.stage.act(
            f"Send {AFTER_OUTBOX + UNRELAYED:,} more, {UNRELAYED:,} of them never relayed, and lose the disk"
        )
        later = self._send(AFTER_OUTBOX)
        self._handle_everything(again=AFTER_POSTGRES)
        self._type("relay", "pause", "--reason", WHY)
        later += self._send(UNRELAYED)
        self.stack.daemon.stop()
        for part in PARTS:
            Path(f"{self.stack.layout.outbox_file}{part}").unlink(missing_ok=True)
        config = str(self.stack.daemon.config_file)
        self._type("outbox", "restore", str(copy), "--config", config, "--reason", WHY, "--yes")
        self.stack.daemon.start()
        with self._client() as client:
            rows = sum(client.health().rows.values())
        self.stage.say(
            f"the outbox knows {rows:,} of {len(self._sent):,} messages; the relay pauses, as in the copy", "red"
        )
        self.stage.act("Send again, under the same ids, what came after the copy, as docs/backup.md says")
        self._send_all(later)
        self._type("relay", "resume", "--reason", WHY)
        self._handle_everything(again=AFTER_POSTGRES)

    def _count(self) -> bool:
        self.stage.act("Count in SQLite, in Postgres and at the handler")
        with self._client() as client:
            recognised = sum(row.duplicate for row in client.export())
        self.stack.daemon.stop()
        outbox, broker = Outbox(self.stack.layout.outbox_file), Broker(self.stack.postgres.url)
        sent = {each.client_message_id for each in self._sent}
        effects = self.receiver.effects_of(TOPIC)
        handled = {effect.client_message_id for effect in effects}
        total = FIRST + AFTER_POSTGRES + WAITING + AFTER_OUTBOX + UNRELAYED
        lines = (
            ("sent", "acknowledged, under ids of their own", Count(len(sent), total)),
            ("accepted", "in Postgres, byte for byte as in the outbox", Count(len(broker.accepted), total)),
            ("in its history", "each of them once", Count(broker.count("history"), total)),
            ("handled", "each by its id, whatever was lost meanwhile", Count(len(handled & sent), total)),
            ("recognised", "sent twice, accepted once: by the broker", Count(recognised, WAITING + AFTER_OUTBOX)),
            ("called again", "since Postgres lost that they were handled", Count(len(effects) - total, AFTER_POSTGRES)),
            ("waiting", "in the outbox", Count(outbox.count("unsettled"), 0)),
            (
                "lost",
                "acknowledged, but not in SQLite, Postgres and at the handler",
                Count(len(sent - handled) + differing(outbox, broker), 0),
            ),
        )
        self.stage.table(
            ("what", "means", "counted", "holds"),
            (((name, means, str(count)), count.holds) for name, means, count in lines),
        )
        if holds := all(count.holds for _, _, count in lines):
            self.stage.say(f"{total:,} sent = {total:,} accepted = {total:,} handled. Nothing was lost.", "bold green")
        return holds

    def _send(self, count: int) -> list[SendRequest]:
        """Send so many new messages, and return them once they are acknowledged."""
        first = len(self._sent)
        messages = [
            SendRequest(to=f"topic:{TOPIC}", body=f"message {first + each}", client_message_id=new_id())
            for each in range(count)
        ]
        self._sent += messages
        self._send_all(messages)
        return messages

    def _send_all(self, messages: Sequence[SendRequest]) -> None:
        with self._client() as client:
            for result in client.send_many(messages):
                if result.problem is not None:
                    raise Fatal(Exit.FAILED, f"a message was refused: {result.problem.detail}")
        self.stage.say(f"{len(messages):,} acknowledged", "green")

    def _handle_everything(self, *, again: int = 0) -> None:
        """Wait until the broker has accepted and the handler has handled everything, `again` of it twice."""
        with self._client() as client:

            def settled() -> bool:
                health = client.health()
                return not (health.rows["pending"] + health.rows["inflight"] + health.missing)

            wait(settled, "for the broker to accept everything")
        wanted = len(self._sent) + again
        wait(lambda: len(self.receiver.effects_of(TOPIC)) >= wanted, "for the handler")
        twice = f", {again:,} of them twice" if again else ""
        self.stage.say(f"{len(self._sent):,} accepted and handled{twice}", "green")

    def _client(self) -> Client:
        return Client(self.stack.layout.socket)

    def _type(self, *words: str) -> None:
        """Run a verb of `postroom` as an operator would, and show what it says."""
        self._run(["postroom", *words], module_command("cli", *words))

    def _postgres(self, program: str, *words: str) -> None:
        self._run([program, *words], [str(postgres_home() / "bin" / program), *words])

    def _run(self, typed: Sequence[str], command: Sequence[str]) -> None:
        self.stage.say(f"$ {shlex.join(typed)}", "bold")
        environment = {**os.environ, **self.stack.environment()}
        done = subprocess.run(  # noqa: S603 - our own words, no shell
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False
        )
        if done.returncode != 0:
            raise Fatal(Exit.FAILED, f"`{shlex.join(typed)}` ended with {done.returncode}: {done.stdout.strip()}")
        for each in done.stdout.splitlines():
            self.stage.say(each)
