"""What was made for kernels, on disk: written in one step, so that none sees half a file, and checked when read."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size  # at the end of each file, where loaders of libraries do not look


@dataclass(frozen=True)
class Files:
    """A folder of compiled kernels, by name: the latest `most` of them, or all."""

    folder: Path
    most: int | None = 4096

    def path(self, name: str) -> Path | None:
        """The file of that name, if it is there and whole."""
        return None if self.read(name) is None else self.folder / name

    def read(self, name: str) -> bytes | None:
        """What was kept under that name; a damaged file is removed."""
        path = self.folder / name
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if _is_whole(content):
            with suppress(OSError):
                os.utime(path)  # what is in use is not the oldest
            return content[:-_DIGEST]
        with suppress(OSError):
            path.unlink()
        return None

    def add(self, name: str, content: bytes) -> Path:
        """Of several writers the last one stays; each wrote the same."""
        return self._write(name, content + hashlib.sha256(content).digest())

    def text(self, name: str, content: str) -> Path:
        """A file that has just this text, for Python and people to read."""
        path, encoded = self.folder / name, content.encode()
        try:
            if path.read_bytes() == encoded:
                return path
        except OSError:
            pass
        return self._write(name, encoded)

    def _write(self, name: str, content: bytes) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=self.folder, prefix=f".{name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(partial).replace(self.folder / name)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        self._forget_oldest()
        return self.folder / name

    def _forget_oldest(self) -> None:
        if self.most is None:
            return
        with suppress(OSError):  # another process may be at the same
            files = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
            if len(files) > self.most:
                files.sort(key=lambda path: path.stat().st_mtime)
                for path in files[: len(files) - self.most]:
                    path.unlink()


def _is_whole(content: bytes) -> bool:
    return len(content) > _DIGEST and hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def user_cache(part: str) -> Files:
    """The user's own cache folder, or one that the variable TILEWISE_CACHE names."""
    return Files(_root() / part)


def _root() -> Path:
    told = os.environ.get("TILEWISE_CACHE")
    if told:
        return Path(told)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tilewise"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewise"
