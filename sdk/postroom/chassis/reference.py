"""The configuration reference: what a config type says of itself, as Markdown."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Final, Literal, Union, get_args, get_origin

import msgspec
from msgspec.inspect import is_struct_type

from postroom.chassis.config import Setting, settings

_NAMES: Final = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "Path": "path",
    "datetime": "time",
}


def reference(config: type[msgspec.Struct], prefix: str | None) -> str:
    """Describe every setting of `config` in a table, one row each; without a prefix no variable overrides them."""
    lines = ["| key | what it does | type | default | variable |", "|---|---|---|---|---|"]
    for setting in settings(config):
        key = ".".join(setting.path)
        cells = (
            f"`{key}`",
            _sentence(setting.description),
            _type(setting),
            _default(setting),
            "-" if prefix is None or _holds_tables(setting.type) else f"`{setting.variable(prefix)}`",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _sentence(description: str) -> str:
    return description[:1].upper() + description[1:].removesuffix(".")


def _type(setting: Setting) -> str:
    words = ", ".join([_name(setting.type), *_bounds(setting)])
    return f"{words} (secret)" if setting.secret else words


def _name(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(part) for part in get_args(kind) if part is not type(None))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(kind))
    if _holds_tables(kind):
        return "tables"
    if origin is list:
        return f"list of {_name(get_args(kind)[0])}"
    if get_args(kind):  # Annotated
        return _name(get_args(kind)[0])
    return _NAMES[kind.__name__]


def _holds_tables(kind: Any) -> bool:
    """Tell whether a setting is a list of tables, as `[[streams]]`."""
    return get_origin(kind) is list and is_struct_type(get_args(kind)[0])


def _bounds(setting: Setting) -> Iterator[str]:
    for meta in setting.meta:
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if (bound := getattr(meta, name)) is not None:
                yield f"{sign} {bound:,}"
        if meta.pattern is not None:
            yield f"`{meta.pattern}`"


def _default(setting: Setting) -> str:
    if setting.default is msgspec.NODEFAULT:
        return "required"
    if setting.default is None or setting.default == []:
        return "-"
    if isinstance(setting.default, bool):
        return f"`{str(setting.default).lower()}`"
    return f"`{setting.default}`"
