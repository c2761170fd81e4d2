"""Whoever is refused reads what to do next: every refusal of the product that a command can end with says it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[3]
ROOMS: Final = ("outbox", "inbox", "ipc", "broker", "broker_client", "daemon", "cli", "embedded", "pipeline")
LIBRARY: Final = (
    "_wire",
    "chassis",
    "claims",
    "ledger",
    "once",
    "worker",
    "delivery/dead_letters",
    "delivery/publication",
)
# raised within a worker, where a person reads them as why a step of a job failed, and the job says what helps
WITHIN: Final = ("ledger/legs.py", "worker/jobs.py", "ledger/errors.py", "ledger/primitives.py")
# what to do, in the order of how often it is said
ORDERS: Final = [
    "use",
    "see",
    "set",
    "name",
    "pass",
    "give",
    "send",
    "write",
    "start",
    "ask",
    "try",
    "wait",
    "choose",
    "check",
    "raise",
    "repeat",
    "run",
    "add",
    "remove",
    "rename",
    "read",
    "look",
    "delete",
    "install",
    "free",
    "make",
    "create",
    "stop",
    "move",
    "let",
    "put",
    "subscribe",
    "configure",
    "omit",
    "rotate",
    "export",
    "mount",
    "chmod",
    "source",
    "publish",
    "log",
    "call",
    "build",
    "keep",
    "take",
    "upgrade",
    "correct",
]
NEXT: Final = re.compile(
    r"`[^`]+`|\(set "  # the command, or what is to be written
    rf"|(?:^|[:;.,(] |[:;.] then |\bor |\band |\bto |\bfirst )(?:{'|'.join(ORDERS)})\b"
    r"|\bmust\b|\bneeds?\b|\bexpected\b|\bagain\b|\bby itself\b|\bdid you mean\b"
)


class Refusal(NamedTuple):
    """A place in the product that refuses, its code, and every text that its sentence is made of."""

    place: str
    code: str
    text: str


def refusals() -> Iterator[Refusal]:
    shared = said_by_name(ast.parse((ROOT / "broker/authentication.py").read_text()).body)
    rooms = [*(ROOT / room for room in ROOMS), *(ROOT / "sdk/postroom" / room for room in LIBRARY)]
    for file in sorted(file for room in rooms for file in room.rglob("*.py")):
        if {"demo", "drill.py"} & {*file.parts} or file.as_posix().endswith(WITHIN):
            continue
        module = ast.parse(file.read_text())
        constants = shared | said_by_name(module.body)
        for function in [node for node in module.body if isinstance(node, ast.FunctionDef)]:
            if isinstance(last := function.body[-1], ast.Return) and last.value is not None:
                constants[f"{function.name}()"] = said(last.value, constants)
        for function in [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]:
            known = constants | said_by_name(ast.walk(function))
            for node in ast.walk(function):
                if not isinstance(node, ast.Call) or len(node.args) < 2:
                    continue
                of = isinstance(node.func, ast.Attribute) and node.func.attr == "of"
                if of or (isinstance(node.func, ast.Name) and node.func.id == "Fatal"):
                    code = node.args[0].value if isinstance(node.args[0], ast.Constant) else ast.unparse(node.args[0])
                    text = said(node.args[1], known)
                    if isinstance(code, str) and re.search(r"[a-z]{4} ", text):  # else it is another's sentence
                        yield Refusal(f"{file.relative_to(ROOT)}:{node.lineno}", code, text)


def said_by_name(nodes: object) -> dict[str, str]:
    """Which texts names are given, one after the other."""
    found: dict[str, str] = {}
    for node in nodes:  # type: ignore[attr-defined]
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) or value is None:
            continue
        for target in targets:
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            for name, one in pairs:
                if isinstance(name, ast.Name):
                    found[name.id] = f"{found.get(name.id, '')} {said(one, found)}".strip()
    return found


def said(node: ast.AST, known: dict[str, str]) -> str:  # noqa: C901, PLR0911 - one for each kind of expression
    """All that an expression can say."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(said(part, known) for part in parts)
        case ast.FormattedValue(value=value):
            inner = said(value, known)
            return inner if len(inner) > 12 else "x"
        case ast.Name(id=name):
            return known.get(name, "")
        case ast.BinOp(left=left, right=right):
            return said(left, known) + said(right, known)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{said(body, known)} {said(orelse, known)}"
        case ast.Call(func=ast.Name(id="why_refused"), args=[_, advice]):
            return f"x; {said(advice, known)}"
        case ast.Call(func=ast.Name(id=name)) if f"{name}()" in known:
            return known[f"{name}()"]
        case ast.Subscript(value=value) | ast.Call(func=ast.Attribute(value=value)):
            return said(value, known)
        case ast.Dict(values=values):
            return " ".join(said(value, known) for value in values)
    return ""


def test_every_refusal_says_what_to_do_next() -> None:
    found = list(refusals())
    assert len(found) > 200
    assert [refusal for refusal in found if not NEXT.search(refusal.text)] == []
