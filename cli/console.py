"""`postroom console`: a page on which operators see and repair what the broker knows (docs/console.md)."""

from __future__ import annotations

from cli.noun import Config, noun

app = noun()


@app.command()
def console(*, config: Config = None) -> None:
    """Serve a page for operators, who log in with their token, until a signal says stop.

    It asks the broker at `broker_url` of its config, or at POSTROOM_CONSOLE_BROKER_URL or POSTROOM_BROKER_URL.
    """
    from console.main import main  # noqa: PLC0415

    raise SystemExit(main(config))
