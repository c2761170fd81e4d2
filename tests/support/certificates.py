"""A certificate for 127.0.0.1, which signs itself, and its key: also one with a passphrase."""

import shutil
from pathlib import Path
from typing import Final

_FILES: Final = Path(__file__).with_name("loopback")
CERTIFICATE: Final = _FILES / "certificate.pem"
KEY: Final = _FILES / "key.pem"
LOCKED_KEY: Final = _FILES / "locked_key.pem"


def private(key: Path, directory: Path) -> Path:
    """Return a copy that only its owner may read, as programs want it."""
    copy = directory / key.name
    shutil.copyfile(key, copy)
    copy.chmod(0o600)
    return copy
