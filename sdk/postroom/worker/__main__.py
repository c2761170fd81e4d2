"""`python -m postroom.worker VERB …`: the processes that run a user's code, with the library and nothing else of ours.

    run        publish, and run the jobs of flows
    consumer   give messages to a handler behind HTTP
    agent      handle messages with an agent's class
    describe   print the name of an agent or a flow, as JSON
    replay     build an agent's state from its event store, as JSON

`postroom worker run`, `postroom consumer run` and `postroom agent run` are the first three.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import msgspec

from postroom._wire.retry import error_text
from postroom.chassis import import_quickly
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.handlers import end_within

_INTERRUPTED: Final = 130  # 128 + SIGINT, as in shells
_LEAVE_SECONDS: Final = 5.0  # for what users' code does at the end of a process


def main() -> int:
    """Run the verb; a `Fatal` becomes a sentence and its exit code."""
    options = _parser().parse_args()
    try:
        import_quickly()
        options.do(options)
    except Fatal as fatal:
        return fatal.report(options.program)
    except ModuleNotFoundError as error:  # what a user's module lacks is a `Fatal` by now
        sentence = f"{error.name} is not installed: install it with `pip install 'postroom[worker]'`"
        return Fatal(Exit.UNAVAILABLE, sentence).report(options.program)
    except KeyboardInterrupt:  # before it listened for the signal
        return _INTERRUPTED
    return Exit.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m postroom.worker", allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, do: Callable[[Any], None], *, says: str, help_text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        added.set_defaults(do=do, program=says)
        return added

    run = verb("run", _run, says="postroom worker", help_text="Publish, and run the jobs of flows.")
    run.add_argument("--config", type=Path, help="a TOML file; POSTROOM_WORKER_… override it")
    run.add_argument("--flow", metavar="MODULE:FLOW", action="append", default=[], help="also run this flow")

    consumer = verb("consumer", _consume, says="postroom consumer", help_text="Post messages to an HTTP handler.")
    consumer.add_argument("--config", type=Path, help="a TOML file; POSTROOM_CONSUMER_… override it")
    consumer.add_argument("--context", help="without a file: the mesh whose events")
    consumer.add_argument("--name", help="without a file: the consumer")
    consumer.add_argument("--handler", help="without a file: where messages are posted to")
    consumer.add_argument("--stream", help="without a file: the stream")
    consumer.add_argument("--subject", dest="subjects", action="append", help="without a file: only these subjects")
    consumer.add_argument("--secret-file", type=Path, help="without a file: the secret that signs requests")

    agent = verb("agent", _handle, says="postroom agent", help_text="Handle messages with an agent's class.")
    agent.add_argument("agent", metavar="MODULE:AGENT", nargs="?", help="the class, where the config names none")
    agent.add_argument("--config", type=Path, help="a TOML file; POSTROOM_AGENT_… override it")
    agent.add_argument("--tenant", help="the mesh that it works in")
    agent.add_argument("--workspace", help="its workspace there")

    describe = verb("describe", _describe, says="postroom", help_text="Print the name of an agent or a flow, as JSON.")
    describe.add_argument("kind", choices=["agent", "flow"])
    describe.add_argument("what", metavar="MODULE:NAME")

    replay = verb("replay", _replay, says="postroom", help_text="Build an agent's state from its store, as JSON.")
    replay.add_argument("agent", metavar="MODULE:AGENT")
    replay.add_argument("database", metavar="EVENTS.DB", type=Path)
    return parser


def _run(options: argparse.Namespace) -> None:
    from postroom.worker.config import load_config  # noqa: PLC0415
    from postroom.worker.process import run  # noqa: PLC0415

    run(load_config(options.config, flows=options.flow))


def _consume(options: argparse.Namespace) -> None:
    from postroom.worker.config import CONSUMER_PREFIX, direct_config, load_consumer_config, worker_of  # noqa: PLC0415
    from postroom.worker.process import run  # noqa: PLC0415

    names = ("context", "name", "handler", "stream", "subjects", "secret_file")
    direct = {name: value for name in names if (value := getattr(options, name))}
    has_variables = any(variable.startswith(CONSUMER_PREFIX) for variable in os.environ)
    if not direct and (options.config is not None or has_variables):
        return run(worker_of(load_consumer_config(options.config)))
    if options.config is not None:
        raise Fatal(Exit.USAGE, "use --config alone: the file has all settings")
    if not {"context", "name", "handler"} <= direct.keys():
        raise Fatal(Exit.USAGE, "give --context, --name and --handler, or --config")
    return run(worker_of(direct_config(**direct)))


def _handle(options: argparse.Namespace) -> None:
    from postroom.worker.config import load_agent_config, worker_of  # noqa: PLC0415
    from postroom.worker.process import run  # noqa: PLC0415

    config = load_agent_config(options.config, tenant=options.tenant, workspace=options.workspace)
    run(worker_of(msgspec.structs.replace(config, agent_class=config.name_agent(options.agent))))


def _describe(options: argparse.Namespace) -> None:
    with redirect_stdout(sys.stderr):  # what a user's module prints is not part of the answer
        if options.kind == "agent":
            from postroom.agent import agent_name  # noqa: PLC0415
            from postroom.delivery.agents import load_agent  # noqa: PLC0415

            found: dict[str, Any] = {"name": agent_name(load_agent(options.what))}
        else:
            from postroom.ledger.engine import load_flow  # noqa: PLC0415

            flow = load_flow(options.what)
            found = {"name": flow.name, "first": flow.first.name, "threshold": flow.threshold}
    sys.stdout.write(_encoded(found))


def _replay(options: argparse.Namespace) -> None:
    from postroom.delivery.agents import load_agent  # noqa: PLC0415
    from postroom.delivery.agents.replay import Differs, replay  # noqa: PLC0415

    with redirect_stdout(sys.stderr):
        try:
            owner, memory = asyncio.run(replay(load_agent(options.agent), options.database))
        except Differs as difference:
            detail = f"{options.database} was altered at {difference}: put a copy from before in its place"
            raise Fatal(Exit.FAILED, detail) from difference
    try:
        text = _encoded(
            {
                **owner._asdict(),
                "position": memory.position,
                "state_hash": memory.state_hash.hex(),
                "state": memory.state,
                "shown": str(memory.state),
            }
        )
    except Exception as error:
        detail = f"the state of {options.agent} cannot be written as text: {error_text(error)}"
        raise Fatal(Exit.FAILED, f"{detail}; its hash is {memory.state_hash.hex()}; correct its class") from error
    sys.stdout.write(text)


def _encoded(found: object) -> str:
    return msgspec.json.encode(found, enc_hook=str).decode() + "\n"


if __name__ == "__main__":
    ended = main()
    end_within(_LEAVE_SECONDS, ended)
    sys.exit(ended)
