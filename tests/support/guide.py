"""What the guides tell root to type, and an editor that fills in what the examples leave open."""

from __future__ import annotations

EDITOR = """
editor() {
    case $1 in
        */broker.toml) sed -i \\
            -e 's#^database_url.*#database_url = "postgresql://postgres@/postgres?host=/run/postgresql"#' \\
            -e 's#^redis_url.*#redis_url = "unix:///run/redis/redis.sock"#' "$1" ;;
        */worker.toml | */billing.toml) sed -i \\
            -e 's#^database_url.*#database_url = "postgresql://postgres@/postgres?host=/run/postgresql"#' \\
            -e 's#^url = "nats:.*#url = "nats://127.0.0.1:4222"#' "$1" ;;
        */counter.toml) sed -i 's#^url = "nats:.*#url = "nats://127.0.0.1:4222"#' "$1" ;;
        */audit-log.env) sed -i 's#^POSTROOM_DATABASE_URL.*#POSTROOM_DATABASE_URL=postgresql:///postgres#' "$1" ;;
        */orders.toml) sed -i 's#https://broker.example.com#http://127.0.0.1:7420#' "$1" ;;
    esac
}
"""


def commands(text: str) -> list[str]:
    """Return the lines of the text's examples that begin with `#`, which root types."""
    blocks = text.split("```console\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    return [line.removeprefix("# ") for line in lines if line.startswith("# ")]
