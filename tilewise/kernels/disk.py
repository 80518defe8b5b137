"""What was made for kernels, on disk: in folders that nobody else may write, in one step, and checked when read."""

from __future__ import annotations

import atexit
import errno
import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tilewise.sharing import Lock

T = TypeVar("T")

_DIGEST = hashlib.sha256().digest_size  # at the end of each file, where loaders of libraries do not look
_WRITABLE_BY_OTHERS = 0o022
_UNFINISHED = 24 * 3600.0  # seconds: whoever began to write a file that long ago was ended
_NOWHERE = Path(os.devnull, "tilewise")  # no folder can be made there: what is kept is this process's own
_NO_HOME = "this user has no home folder; set TILEWISE_CACHE to a folder that you can write"
# What ctypes, apache-tvm-ffi and drivers raise for a file that is no library, or none for this machine.
_NOT_LOADED = (OSError, AttributeError, RuntimeError)

_logger = logging.getLogger("tilewise")
_told: set[str] = set()


class UntrustedError(OSError):
    """Others may write where compiled code would be loaded from."""


class NoRoomError(OSError):
    """There is no folder that can be written, not even for this process alone."""


@dataclass(frozen=True)
class Files:
    """A folder of compiled kernels, by name: the latest `most` of them, or all."""

    folder: Path
    most: int | None = 4096
    root: Path | None = None  # folders from there on are looked at, too, if others may write them
    guarded: bool = True  # False: of a folder whose writers could change Tilewise itself, or that is only written

    def __str__(self) -> str:
        return "this process alone" if self.folder.is_relative_to(_NOWHERE) else str(self.folder)

    # -- reading ------------------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path | None:
        """The file of that name, if it is there and whole."""
        return next((files.folder / name for files in self._places() if files._read(name) is not None), None)

    def read(self, name: str) -> bytes | None:
        """What was kept under that name; a damaged file is removed."""
        return next((found for files in self._places() if (found := files._read(name)) is not None), None)

    def loaded(self, name: str, load: Callable[[Path], T], can_make: bool = True) -> T | None:
        """What `load` makes of the file of that name. One that does not load is thrown away, if it can be made again:
        another machine may have made it."""
        path = self.path(name)
        if path is None:
            return None
        try:
            return load(path)
        except _NOT_LOADED as error:
            if can_make:
                self.forget(name, error)
            else:
                _tell_once(f"{path} does not load, and is passed over: {error}")
            return None

    def forget(self, name: str, error: Exception) -> None:
        """Throw a file away that is whole and does not load, to be made again."""
        _logger.warning("%s does not load, and is made again: %s", self.folder / name, error)
        for files in self._places():
            with suppress(OSError):
                (files.folder / name).unlink()

    def names(self) -> list[str]:
        """Of the files that are there, if they may be used at all."""
        with suppress(OSError):
            if self.untrusted() is None:
                return [path.name for path in self.folder.iterdir() if not path.name.startswith(".")]
        return []

    def sizes(self) -> list[int]:
        """Those of all files, in bytes."""
        found = []
        for path in _files_in(self.folder):
            with suppress(OSError):
                found.append(path.stat().st_size)
        return found

    def text(self, name: str) -> str:
        """That of a file for people; OSError if there is none, or others may have written it."""
        return self._bytes(name).decode()

    def untrusted(self) -> str | None:
        """Why nothing is loaded from here, and what to do; or None."""
        if not self.guarded:
            return None
        for folder in self._folders():
            try:
                why = _written_by_others(folder, folder.stat())
            except (FileNotFoundError, NotADirectoryError):  # there is nothing in it
                continue
            except OSError as error:
                why = f"{folder} cannot be looked at ({_words(error)})"
            if why is not None:
                return why
        return None

    def unusable(self) -> str | None:
        """Why nothing can be kept here, and what to do; or None, as far as can be told without writing."""
        if self.folder.is_relative_to(_NOWHERE):
            return _NO_HOME
        there = next(folder for folder in (self.folder, *self.folder.absolute().parents) if os.path.lexists(folder))
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            return self.untrusted()
        return f"{there} cannot be written; set TILEWISE_CACHE to a folder that you can write"

    def _places(self) -> list[Files]:
        """Where a file may be: what this process made for itself comes first, for it knows why."""
        own = _own.files(self)
        return [self] if own is None else [own, self]

    def _folders(self) -> Iterator[Path]:
        yield self.folder
        for folder in self.folder.parents if self.root is not None else ():
            if not folder.is_relative_to(self.root):  # type: ignore[arg-type]
                break
            yield folder

    def _read(self, name: str) -> bytes | None:
        path = self.folder / name
        try:
            content = self._bytes(name)
        except UntrustedError as error:
            _tell_once(f"{self} is passed over: {error}")
            return None
        except OSError:
            return None
        if _is_whole(content):
            with suppress(OSError):
                os.utime(path)  # what is in use is not the oldest
            return content[:-_DIGEST]
        with suppress(OSError):
            path.unlink()
        return None

    def _bytes(self, name: str) -> bytes:
        """Of the very file that was looked at, whatever takes its place meanwhile."""
        self._check()
        path = self.folder / name
        with open(path, "rb", opener=_opened_at_once) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file", str(path))
            why = _written_by_others(path, about) if self.guarded else None
            if why is not None:
                raise UntrustedError(why)
            return file.read()

    def _check(self) -> None:
        why = self.untrusted()
        if why is not None:
            raise UntrustedError(why)

    # -- writing ------------------------------------------------------------------------------------------------------

    def add(self, name: str, content: bytes) -> Path:
        """Of several writers the last one stays; each wrote the same."""
        return self._write(name, content + hashlib.sha256(content).digest())

    def keep(self, name: str, content: bytes) -> Path:
        """The same; where the folder cannot be written or trusted, the file is this process's own, and ends with it."""
        try:
            return self.add(name, content)
        except OSError as error:
            self.tell_why_not(error)
            try:
                return _own.made(self).add(name, content)
            except OSError as also:
                raise NoRoomError(
                    f"a compiled kernel can be written neither to the cache, {self} ({_words(error)}), nor to a "
                    f"temporary folder ({_words(also)}); set TILEWISE_CACHE or TMPDIR to a folder that you can write"
                ) from also

    def tell_why_not(self, error: OSError) -> None:
        """Once: later processes will do the same work again."""
        if self.folder.is_relative_to(_NOWHERE):
            told = f"compiled kernels are not kept: {_NO_HOME}"
        elif isinstance(error, UntrustedError):
            told = f"compiled kernels are not kept in {self}: {error}"
        else:
            told = f"the compiled kernel is not kept: {self} cannot be written ({_words(error)})"
        _tell_once(told)

    def add_text(self, name: str, content: str) -> Path:
        """A file that has just this text, for people to read."""
        return self._write(name, content.encode())

    def _write(self, name: str, content: bytes) -> Path:
        self._check()
        _make_folder(self.folder)
        handle, partial = tempfile.mkstemp(dir=self.folder, prefix=f".{name}.")
        try:
            try:
                _write_all(handle, content)
            finally:
                os.close(handle)
            Path(partial).replace(self.folder / name)
        except BaseException:
            with suppress(OSError):
                Path(partial).unlink()
            raise
        self._forget_oldest()
        return self.folder / name

    def _forget_oldest(self) -> None:
        """Folders that others left here stay, and what is being written now."""
        if self.most is None:
            return
        kept: list[tuple[float, Path]] = []
        for path in _files_in(self.folder):
            with suppress(OSError):  # another process may be at the same
                changed = path.stat().st_mtime
                if not path.name.startswith("."):
                    kept.append((changed, path))
                elif changed < time.time() - _UNFINISHED:
                    path.unlink()
        for _, path in sorted(kept)[: max(len(kept) - self.most, 0)]:
            with suppress(OSError):
                path.unlink()


def _files_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_file()]
    except OSError:
        return []


def _opened_at_once(path: str, flags: int) -> int:
    """A pipe that lies there would have its reader wait for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _is_whole(content: bytes) -> bool:
    return len(content) > _DIGEST and hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _write_all(handle: int, content: bytes) -> None:
    """A disk that is nearly full takes a part of what it is given, and says so by a number."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _make_folder(folder: Path) -> None:
    """With those above it, each for this user alone, whatever the umask is."""
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        _make_folder(folder.parent)
        with suppress(FileExistsError):  # another process was faster
            folder.mkdir(0o700)


def _written_by_others(path: Path, about: os.stat_result) -> str | None:
    """Why what is there is not trusted, as ssh would not trust a key, and what to do; or None."""
    if not hasattr(os, "geteuid"):  # Windows has no such modes, and folders of users are theirs alone
        return None
    if about.st_uid not in (0, os.geteuid()):
        who = f"user {about.st_uid}, and this process is user {os.geteuid()}'s"
        return f"{path} belongs to {who}; make a copy of your own, or name another folder"
    if about.st_mode & _WRITABLE_BY_OTHERS:
        mode = f"mode {about.st_mode & 0o7777:04o}"
        return f"other users may write {path} ({mode}); remove it, or `chmod -R go-w` it if nobody else wrote there"
    return None


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _tell_once(told: str) -> None:
    if told not in _told:
        _told.add(told)
        _logger.warning("%s", told)


def write_whole(path: Path, content: bytes) -> None:
    """A file that a user asked for: it stays as it was, or is written to the end. Pipes and devices take what comes."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        if not isinstance(error, PermissionError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        path.write_bytes(content)  # in that folder nothing can be made, and the file may be there


# -- of this process alone --------------------------------------------------------------------------------------------


class _Own:
    """A temporary folder for what cannot be kept, made when it is first needed, and removed when the process ends."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = Lock()

    def files(self, instead_of: Files) -> Files | None:
        """Those that were made instead of another folder's, if there are any."""
        if self._folder is None:
            return None
        part = hashlib.sha256(os.fsencode(instead_of.folder)).hexdigest()[:16]
        return Files(self._folder / part, root=self._folder)

    def made(self, instead_of: Files) -> Files:
        with self._lock:
            if self._folder is None or not self._folder.is_dir():  # a parent that forked may have removed its own
                self._folder = Path(tempfile.mkdtemp(prefix="tilewise-"))
                atexit.register(_remove, self._folder, os.getpid())
        made = self.files(instead_of)
        assert made is not None
        return made


def _remove(folder: Path, process: int) -> None:
    """Children of a fork leave their parent's alone."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


_own = _Own()


@contextmanager
def workplace() -> Iterator[Path]:
    """A temporary folder for a compiler to work in."""
    try:
        made = tempfile.TemporaryDirectory(prefix="tilewise-", ignore_cleanup_errors=True)
    except OSError as error:
        raise NoRoomError(f"{_no_room(error)}") from error
    with made as folder:
        try:
            yield Path(folder)
        except OSError as error:
            if error.filename is not None and str(error.filename).startswith(folder):
                raise NoRoomError(_no_room(error)) from error
            raise


def _no_room(error: OSError) -> str:
    return (
        f"a compiler needs a temporary folder, and none can be written ({_words(error)}); free some room, or set "
        "TMPDIR to a folder that you can write"
    )


# -- the user's cache -------------------------------------------------------------------------------------------------


def user_cache(part: str) -> Files:
    """The user's own cache folder, or one that the variable TILEWISE_CACHE names."""
    root = cache_root() or _NOWHERE
    return Files(root / part, root=root)


def folders_below(files: Files) -> list[Files]:
    """A folder and all that are in it, as they are trusted."""
    below = [Path(folder) for folder, _, _ in os.walk(files.folder)]
    return [files, *(replace(files, folder=folder) for folder in below if folder != files.folder)]


def cache_root() -> Path | None:
    """Where the user's cache is; None if this user has no home folder."""
    told = os.environ.get("TILEWISE_CACHE")
    if told:
        return Path(told).absolute()
    if sys.platform == "darwin":
        home = _home()
        return None if home is None else home / "Library" / "Caches" / "tilewise"
    named = _absolute(os.environ.get("XDG_CACHE_HOME"))
    if named is None:
        home = _home()
        named = None if home is None else home / ".cache"
    return None if named is None else named / "tilewise"


def _home() -> Path | None:
    """HOME, or what the system knows of the user. A container's user may be unknown to it."""
    named = _absolute(os.environ.get("HOME")) if os.name == "posix" else None
    if named is None:
        with suppress(KeyError, RuntimeError, ImportError):
            named = _absolute(_home_of_user())
    return named


def _home_of_user() -> str:
    if os.name != "posix":
        return str(Path.home())
    import pwd

    return pwd.getpwuid(os.getuid()).pw_dir


def _absolute(named: str | None) -> Path | None:
    """A relative path would be another folder wherever a process is started: it is passed over, as XDG wants it."""
    return Path(named) if named and Path(named).is_absolute() else None
