"""Variants that a system wrote as Python: modules in memory, whose text compilers, debuggers and people can ask for."""

from __future__ import annotations

import hashlib
import linecache
import sys
import weakref
from collections import deque
from importlib.abc import ExecutionLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

from tilewise.sharing import Lock

MOST = 1024  # modules that are found by name; one in use lives on without
_lock = Lock()
_names: deque[str] = deque()


class _Text(ExecutionLoader):
    """A module's text. Nothing is on disk: neither the text nor bytecode, which anyone could have put there."""

    def __init__(self, filename: str, text: str) -> None:
        self._filename, self._text = filename, text

    def get_filename(self, fullname: str) -> str:
        return self._filename

    def get_source(self, fullname: str) -> str:
        return self._text

    def show(self) -> None:
        """To inspect.getsource, which compilers call, and to tracebacks, while any function of the module is there:
        functions hold the loader by their globals."""
        lines = len(self._text), None, self._text.splitlines(keepends=True), self._filename
        linecache.cache[self._filename] = lines  # with no time of a change: no file is ever looked for
        weakref.finalize(self, _hide, self._filename, lines).atexit = False


def _hide(filename: str, lines: object) -> None:
    if linecache.cache.get(filename) is lines:  # and not those of a later module of the same text
        del linecache.cache[filename]


def module(system: str, text: str) -> ModuleType:
    """The text as a module; the same one for the same text, as long as it is among the latest."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    name = f"{__package__}.{system}.variant_{digest}"
    with _lock:
        if name not in sys.modules:
            _execute(name, _Text(f"<tilewise>/{system}/variant_{digest}.py", text))
            _names.append(name)
            if len(_names) > MOST:
                sys.modules.pop(_names.popleft(), None)
        return sys.modules[name]


def _execute(name: str, loader: _Text) -> None:
    spec = spec_from_loader(name, loader)
    assert spec is not None
    made = sys.modules[name] = module_from_spec(spec)  # compilers look their functions' module up
    loader.show()
    try:
        loader.exec_module(made)
    except BaseException:
        del sys.modules[name]  # or the next call would find what is half there
        raise
