"""Files and directories that only the program's user can change, under any umask.

A user that owns a directory, or can write to it, can replace a file in it; one that can write to a directory above it
can replace the directory. So a program keeps its state, its sockets and its locks only where no other user can, and
follows no link to them. Root is trusted, and so is a group that is this user's alone.

Users are named as the system knows them: no variable of the environment changes it.
"""

import errno
import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Final

MAX_FILE: Final = 16 * 1024 * 1024  # bytes of a file that is read whole
_NO_LINKS: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}  # of a file system without hard links
_OVERFLOW_UID: Final = 65_534  # the owner that a user namespace shows for files of users outside it
_WHOLE: Final = ["0", "0", "4294967295"]  # the uid map of a process that is in no user namespace


@lru_cache(maxsize=256)
def user_name(uid: int) -> str | None:
    """Return the login name of `uid`, None where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def this_user() -> str:
    """Return the name of the user that runs this program."""
    return _name(os.getuid())


def is_there(path: Path) -> bool:
    """Return whether something has this path; raises `OSError` where this process may not know.

    `Path.exists` has answered False then since Python 3.14.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def private_directory(directory: Path, *, may_be_anothers: bool = False) -> None:
    """Create a directory for this user alone (0700); missing parents are created so that only this user may write.

    An existing one keeps its mode. Raises `OSError` where others may write to it, or to one above it, and then makes
    none; `may_be_anothers` lets root work in another user's directory on behalf of that user.
    """
    for each in (directory, *directory.parents):
        if each.is_symlink() and not is_there(each):
            _refuse(
                f"{each} is a link to {each.readlink()}, which is not there: remove it, or choose another directory"
            )
    if not is_there(directory):
        _check_above(directory, {0, os.geteuid()})
    for parent in reversed(directory.parents):
        if not parent.exists():
            parent.mkdir(mode=0o755, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    check_private(directory, may_be_anothers=may_be_anothers)


def check_private(directory: Path, *, may_be_anothers: bool = False) -> None:
    """Raise `OSError`, whose text is a sentence, where others own the directory or can write to it or above it."""
    here = directory.resolve(strict=True)
    status = here.stat()
    trusted = {0, os.geteuid()}
    if may_be_anothers and os.geteuid() == 0:
        trusted.add(status.st_uid)
    if status.st_uid not in trusted:
        _refuse(f"it belongs to {_name(status.st_uid)}: give it to {_name(os.geteuid())}, or choose another directory")
    if _others_may_write(status):
        _refuse(f"others may write to it: chmod go-w {here}, or choose another directory")
    _check_above(directory, trusted)


def _check_above(directory: Path, trusted: set[int]) -> None:
    """Raise the same for the directories above one that need not be there yet."""
    if _in_user_namespace():
        trusted = {*trusted, _OVERFLOW_UID}
    above = [*directory.resolve().parents]  # in which this one, or a link on the way to it, has its name
    for link in (each for each in (directory.absolute(), *directory.absolute().parents) if each.is_symlink()):
        if (owner := link.lstat().st_uid) not in trusted:
            _refuse(f"the link {link} on the way to it belongs to {_name(owner)}: choose another directory")
        above += [link.parent.resolve(), *link.parent.resolve().parents]
    for parent in filter(is_there, above):
        status = parent.stat()
        if status.st_uid not in trusted:
            _refuse(f"the directory {parent} above it belongs to {_name(status.st_uid)}: choose another directory")
        if _others_may_write(status) and not status.st_mode & stat.S_ISVTX:
            advice = f"chmod go-w {parent}, or choose another directory"
            _refuse(f"others may write to the directory {parent} above it: {advice}")


def open_private(path: Path, flags: int = os.O_RDWR) -> int:
    """Open a regular file of a program's own, created (0600) where it is missing; raises `OSError`, also for a link."""
    refuse_link(path)
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def create_private(path: Path) -> None:
    """Create the same file where it is missing, and raise as opening it would, but without opening it.

    POSIX takes every lock that a process has on a file away as soon as it closes any descriptor of it, and these locks
    are SQLite's.
    """
    refuse_link(path)
    with suppress(FileExistsError):
        os.mknod(path, stat.S_IFREG | 0o600)
    if not os.access(path, os.R_OK | os.W_OK):
        number = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(number, os.strerror(number), str(path))


def read_regular(file: Path) -> tuple[bytes, os.stat_result]:
    """Return what a file that a config names holds, and its status; raises `OSError`.

    A FIFO would hold up the whole program until somebody writes to it, and a device may have no end.
    """
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return read_whole(stream), status


def read_whole(stream: BinaryIO) -> bytes:
    """Return all that a file or a pipe holds; raises `OSError` for one without an end in sight."""
    content = stream.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise OSError(errno.EFBIG, f"it has more than {MAX_FILE} bytes")
    return content


def replace_private(file: Path, content: str | Callable[[], str], *, for_owner: bool = False) -> None:
    """Replace a file of a program's own (0600) with `content`: whole and on disk, or not at all.

    Programs that do so at once take turns; a `content` that depends on the present one is a function, called within the
    turn. The file is this user's, or `for_owner` of its directory. Raises `OSError`, and what the function raises.
    """
    draft = file.with_name(f"{file.name}.new")
    while True:
        descriptor = open_private(draft, os.O_WRONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # one that a killed program left is free
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), draft.lstat()):
                break
        os.close(descriptor)  # another program's draft, which has replaced the file by now
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:  # closed last: that ends this one's turn
            try:
                stream.truncate()
                if for_owner:
                    hand_over(descriptor, file.parent)
                stream.write(content if isinstance(content, str) else content())
                stream.flush()
                os.fsync(descriptor)
                draft.replace(file)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
    except OSError as error:
        if error.filename is None:  # of a write, or of the close that tries it again
            error.filename = str(file)
        raise
    sync(file.parent)


def put_new(draft: Path, file: Path) -> None:
    """Give a whole draft the name of a new file in the same directory, with its bytes on disk.

    Raises `FileExistsError` where the name is taken: nothing is overwritten.
    """
    sync(draft)  # a name that survives a power cut must not be that of an empty file
    try:
        file.hardlink_to(draft)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))  # the name is this one's now
        draft.replace(file)


def sync(path: Path) -> None:
    """Put a file, or the names in a directory, on disk."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def refuse_link(path: Path) -> None:
    """Raise `OSError` where `path` is something other than a regular file, or is another user's."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        _refuse(f"{path} is a symbolic link: remove it", errno.ELOOP)
    if not stat.S_ISREG(status.st_mode):
        _refuse(f"{path} is not a regular file: move it, or choose another path")
    if status.st_uid not in {0, os.geteuid(), path.parent.stat().st_uid}:
        _refuse(f"{path} belongs to {_name(status.st_uid)}: give it to {_name(os.geteuid())}")


def hand_over(fd: int, directory: Path) -> None:
    """Give an open file to the owner of its directory; only root can, and only root needs to.

    A daemon runs as another user, and has to open what root writes for it.
    """
    if os.geteuid() == 0:
        owner = directory.stat()
        os.fchown(fd, owner.st_uid, owner.st_gid)


def give_up(fd: int) -> None:
    """Let go of an open file or connection in a forked child, whose objects may still close that number."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _others_may_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status.st_gid)


def _is_private_group(gid: int) -> bool:
    """Return whether a group is root's or this user's alone, as many systems give each user one."""
    if gid == 0:
        return True
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    mine = user_name(os.geteuid())
    return gid == os.getegid() and group.gr_name == mine and set(group.gr_mem) <= {mine}


def _in_user_namespace() -> bool:
    try:
        return Path("/proc/self/uid_map").read_text("ascii").split() != _WHOLE
    except OSError:
        return False


def _name(uid: int) -> str:
    return user_name(uid) or f"uid {uid}"


class _Advice(str):
    """Why a path is refused, and what to do about it."""

    __slots__ = ()


def _refuse(sentence: str, number: int = errno.EPERM) -> None:
    raise OSError(number, _Advice(sentence))


def why_refused(error: OSError, advice: str) -> str:
    """Return why a path cannot be used, with `advice` where that does not say what to do."""
    return error.strerror if isinstance(error.strerror, _Advice) else f"{error.strerror}; {advice}"
