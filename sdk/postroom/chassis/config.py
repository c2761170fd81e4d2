"""Configuration: one TOML file per process, decoded into typed structs, overridden by the environment.

An unknown key, a wrong type or a value out of range is a `Fatal` with exit code 78 that names the key's path.
A config type is a `msgspec.Struct` with `forbid_unknown_fields`, whose fields are scalars, lists, paths or such
structs (also `| None`: a section that may be left out), each described by `msgspec.Meta(description=…)`. A secret
inside a value is marked with `SECRET`.
"""

import os
import pwd
import ssl
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from postroom._wire.words import shape_fault
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import read_regular, read_whole

C = TypeVar("C", bound=msgspec.Struct)

MAX_DAYS: Final = 36_500  # a hundred years: Postgres, NATS or Python cannot represent times much further away
MAX_SECONDS: Final = MAX_DAYS * 86_400

Days = Annotated[float, msgspec.Meta(gt=0, le=MAX_DAYS)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
ConnectSeconds = Annotated[float, msgspec.Meta(gt=0, le=300, description="longest wait for a connection, in seconds")]
Host = Annotated[str, msgspec.Meta(min_length=1)]  # to listen on: an empty one is every address of the machine
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], msgspec.Meta(description="lowest level that is logged")
]

SECRET: Final = msgspec.Meta(extra={"secret": True})
MASK: Final = "********"
_NEARLY: Final = 0.8  # how like a setting's name a variable's has to be to count as misspelt (difflib's ratio)


class Setting(NamedTuple):
    """One leaf of a config type: its path, its bare type, its annotations and its default."""

    path: tuple[str, ...]
    type: Any
    meta: tuple[msgspec.Meta, ...]
    default: Any

    @property
    def description(self) -> str:
        """What the setting does, from its type."""
        return next((meta.description for meta in self.meta if meta.description), "")

    @property
    def secret(self) -> bool:
        """Whether the value may never be shown."""
        return any((meta.extra or {}).get("secret") for meta in self.meta)

    def variable(self, prefix: str) -> str:
        """Name the environment variable that overrides the setting."""
        return prefix + "_".join(self.path).upper()


def load(
    config: type[C],
    file: Path | None,
    *,
    prefix: str,
    environ: Mapping[str, str] = os.environ,
    shared: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
) -> C:
    """Decode `file` (or nothing) and the variables `<prefix><PATH>` into `config`.

    A list is given in the environment as comma-separated words. `shared` maps variables of all programs, as `postroom
    up` writes them, to the setting (`NATS_URL`) that each is the default of where neither the file nor the program's
    own variable has it: what a user sets wins over what is inherited. `options` maps the variables that options of the
    command line were put into to these. Raises `Fatal` (78) with the path of what is wrong, and the variable or the
    file that says it; (2) with the option.
    """
    names = {setting.variable("") for setting in settings(config)}
    for variable in environ:  # refuse one that is nearly a setting's; any other belongs to another program
        name = variable.removeprefix(prefix)
        meant = name not in (variable, *names) and get_close_matches(name, names, n=1, cutoff=_NEARLY)
        if meant:
            raise Fatal(Exit.CONFIG, f"{variable} is not a setting: did you mean {prefix}{meant[0]}?")
    tree = _read(file) if file is not None else {}
    said = set(_leaves(tree))
    inherited = {prefix + key: name for name, key in (shared or {}).items() if name in environ}
    variables: dict[str, str] = {}  # of each setting that the environment has, the variable
    for setting in settings(config):
        variable = setting.variable(prefix)
        if variable not in environ and setting.path not in said:
            variable = inherited.get(variable, variable)
        if variable in environ:
            _set(tree, setting, environ[variable])
            variables[".".join(setting.path)] = variable
    if file is None:
        # refuse an environment that, without a file, leaves out what has no default
        needed = [setting.variable(prefix) for setting in settings(config) if setting.default is msgspec.NODEFAULT]
        if missing := [variable for variable in needed if variable not in {**inherited, **environ}]:
            sentence = "no config file was given, and the environment alone is not enough: pass one with --config FILE"
            raise Fatal(Exit.CONFIG, f"{sentence}, or set {', '.join(missing)}")
    try:
        return msgspec.convert(tree, config, dec_hook=_decode)
    except msgspec.ValidationError as error:
        field, sentence = shape_fault(error, config)
        variable = variables.get((field or "").partition("[")[0], "")
        if option := (options or {}).get(variable):
            raise Fatal(Exit.USAGE, f"{option}: {sentence.removeprefix(f'{field}: ')}") from error
        where = variable or file or "environment"
        raise Fatal(Exit.CONFIG, f"{where}: {sentence}") from error


def state_home(environ: Mapping[str, str], advice: str) -> Path:
    """Return the directory in which this user's programs keep their state; of root, that of services.

    Raises `Fatal` (78) with `advice` for a user without a home.
    """
    if state := environ.get("XDG_STATE_HOME"):
        return Path(state)
    if os.getuid() == 0:
        return Path("/var/lib")
    try:
        home = environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError as error:
        raise Fatal(Exit.CONFIG, f"HOME is not set, and this user has no home: set it, or {advice}") from error
    return Path(home) / ".local" / "state"


def read_secret(file: Path, what: str) -> bytes:
    """Return the secret that a file holds, without the white space around it.

    Raises `Fatal` (78), which says `what` the file is, where it cannot be read or is open to every user.
    """
    try:
        content, status = read_regular(file)
    except OSError as error:
        raise Fatal(Exit.CONFIG, f"cannot read {what} {file}: {error.strerror}; check that file") from error
    if status.st_mode & stat.S_IRWXO:
        raise Fatal(Exit.CONFIG, f"every user can open {what} {file}: chmod 600 it, and change it")
    return content.strip()


def trusting(ca_file: Path | None, setting: str) -> ssl.SSLContext | None:
    """Return a context that trusts only the authorities in a file, None without one; `Fatal` (78) names `setting`."""
    if ca_file is None:
        return None
    try:
        read_regular(ca_file)
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # an unreadable file, or an ssl.SSLError for one that holds no certificate
        raise Fatal(Exit.CONFIG, f"{setting}: cannot use {ca_file}: {_why_unusable(error)}; check that file") from error


def show_certificate(tls: ssl.SSLContext, certificate: Path, key: Path, cert_setting: str, key_setting: str) -> None:
    """Have a context show a certificate to its peers.

    Raises `Fatal` (78) where one of the files, which the settings name, is unusable, or every user can read the key.
    """

    def refuse() -> NoReturn:  # in the place of OpenSSL, which would wait for an answer at the terminal
        advice = f"write it without one: openssl pkey -in {key} -out NEW, and chmod 600 it"
        raise Fatal(Exit.CONFIG, f"{key_setting} {key} has a passphrase: {advice}")

    try:
        read_regular(certificate)
        _, status = read_regular(key)
        if status.st_mode & stat.S_IRWXO:
            raise Fatal(Exit.CONFIG, f"{key_setting} {key} is open to every user: chmod 600 it, and change it")
        tls.load_cert_chain(certificate, key, refuse)
    except OSError as error:  # or an ssl.SSLError
        what = f"cannot load {cert_setting} {certificate} with {key_setting} {key}"
        raise Fatal(Exit.CONFIG, f"{what}: {_why_unusable(error)}; check both files") from error


def _why_unusable(error: OSError) -> str:
    reason: str | None = getattr(error, "reason", None)  # of an `ssl.SSLError`
    return str(error.strerror) if reason is None else reason.replace("_", " ").lower()


def settings(config: type[msgspec.Struct], path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Walk every leaf of a config type, in the order it is written."""
    hints = get_type_hints(config, include_extras=True)
    for field in msgspec.structs.fields(config):
        hint = hints[field.name]
        bare, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        may_be_absent = type(None) in get_args(bare)
        kinds = [part for part in get_args(bare) if part is not type(None)] if may_be_absent else [bare]
        only = kinds[0] if len(kinds) == 1 else None
        if may_be_absent and get_origin(only) is Annotated:  # what bounds the one type of a value that may be absent
            only, *bounds = get_args(only)
            bare, extras = only | None, [*extras, *bounds]
        if (section := only if isinstance(only, type) and issubclass(only, msgspec.Struct) else None) is not None:
            inner = settings(section, (*path, field.name))
            if section is not bare:  # a section that may be left out, and all of its settings with it
                inner = (each._replace(default=None) if each.default is msgspec.NODEFAULT else each for each in inner)
            yield from inner
        else:
            default = field.default_factory() if callable(field.default_factory) else field.default
            meta = tuple(extra for extra in extras if isinstance(extra, msgspec.Meta))
            yield Setting((*path, field.name), bare, meta, default)


def effective(config: msgspec.Struct) -> Iterator[tuple[Setting, Any]]:
    """Yield each setting with its value, secrets masked: what `daemon check` prints."""
    for setting in settings(type(config)):
        value: Any = config
        for name in setting.path:
            value = getattr(value, name, None)  # None for all of a section that is left out
        yield setting, MASK if setting.secret and value else value


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:  # also a pipe, as of a shell's <(…)
            return tomllib.loads(read_whole(stream).decode("utf-8-sig"))  # some editors begin with a byte order mark
    except OSError as error:
        detail = f"cannot read the config {file}: {error.strerror}; pass another with --config FILE"
        raise Fatal(Exit.CONFIG, detail) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Fatal(Exit.CONFIG, f"{file} is not TOML: {error}; see docs/configuration.md") from error


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _set(tree: dict[str, Any], setting: Setting, text: str) -> None:
    *tables, key = setting.path
    for table in tables:
        branch = tree.setdefault(table, {})
        if not isinstance(branch, dict):
            return  # the file holds a value where a table belongs; decoding says so
        tree = branch
    if get_origin(setting.type) is list:
        (kind,) = get_args(setting.type)
        tree[key] = [_value(word.strip(), kind) for word in text.split(",") if word.strip()]
    else:
        tree[key] = _value(text, setting.type)


def _value(text: str, kind: Any) -> Any:
    """Read a word of the environment; what is no `kind` stays text, which is a path or refused by decoding."""
    with suppress(msgspec.ValidationError):
        return msgspec.convert(text, kind, strict=False)
    return text


def _decode(wanted: type, value: Any) -> Any:
    if wanted is Path and isinstance(value, str):
        if value == "":
            raise ValueError("Expected a path, got an empty text")
        if "\0" in value:
            raise ValueError("Expected a path, got one with a NUL character")
        text = "$".join(map(os.path.expandvars, value.split("$$")))
        try:
            return Path(text).expanduser().absolute()  # users' code may change the directory
        except RuntimeError as error:  # no such user, or one without a home
            raise ValueError(f"Expected a path, got {value!r}, whose home directory is unknown") from error
    raise TypeError(f"Expected {wanted.__name__}, got {type(value).__name__}")
