"""The description of `postroom-server` on its page of an index: the README, without links into the repository.

`files` in `[tool.hatch.metadata.hooks.custom]` is the address below which the files of a release are served, if there
is one: then links and pictures become absolute. Otherwise pictures are left out, and links become names of files in
the source distribution.
"""

import re
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK: Final = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<file>[^)#]+)(?P<part>#[^)]*)?\)")
_NOTE: Final = "\nThe files that this page names are in the source distribution of `postroom-server`.\n"


def described(readme: str, files: str | None) -> str:
    """Return the README with no link or picture relative to the repository."""

    def link(found: re.Match[str]) -> str:
        picture, text, file, part = found.group("picture", "text", "file", "part")
        if files:
            return f"{picture}[{text}]({files.rstrip('/')}/{file}{part or ''})"
        if picture:
            return ""
        return f"`{file}`" if text == file else f"{text} (`{file}`)"

    return _LINK.sub(link, readme) + ("" if files else _NOTE)


class Description(MetadataHookInterface):
    """Sets `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read the README where the project is built."""
        text = described(Path(self.root, "README.md").read_text("utf-8"), self.config.get("files"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
