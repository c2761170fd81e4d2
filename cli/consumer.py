"""`postroom consumer …`: give the messages of a stream to a handler behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.noun import Config, noun

app = noun("Post messages to an HTTP handler.")

Context = Annotated[
    str | None, typer.Option("--context", help="Without a file: the mesh whose events.", metavar="SLUG")
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", help="Without a file: the consumer's name; consumers of one name share the work.", metavar="NAME"
    ),
]
Handler = Annotated[
    str | None, typer.Option("--handler", help="Without a file: where messages are posted to.", metavar="URL")
]
Stream = Annotated[
    str | None, typer.Option("--stream", help="Without a file: the stream [default: <CONTEXT>_EVENTS].", metavar="NAME")
]
Subjects = Annotated[
    list[str] | None,
    typer.Option("--subject", help="Without a file: only these subjects [default: all].", metavar="FILTER"),
]

SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        help="Without a file: the secret that signs requests [default: unsigned].",
        readable=False,  # reading it says better what is wrong
        metavar="FILE",
    ),
]


@app.callback()
def consumer() -> None:
    """Post messages to an HTTP handler."""


@app.command()
def run(
    *,
    config: Config = None,
    context: Context = None,
    name: Name = None,
    handler: Handler = None,
    stream: Stream = None,
    subject: Subjects = None,
    secret_file: SecretFile = None,
) -> None:
    """Consume until a signal says stop, with a config file (--config), or with --context, --name and --handler.

    Without a file, POSTROOM_NATS_URL and POSTROOM_DATABASE_URL name the servers, as `postroom up` sets them.
    """
    from cli.worker_process import become_worker, options  # noqa: PLC0415

    words = options(
        config=config,
        context=context,
        name=name,
        handler=handler,
        stream=stream,
        subject=subject,
        secret_file=secret_file,
    )
    become_worker("consumer", *words)
