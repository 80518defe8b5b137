"""What threads share, and the children of a fork inherit: locks that nobody can leave locked for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Lock:
    """A lock that the child of a fork finds open, whoever held it."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):  # where there is fork
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()


class Kept(Generic[T]):
    """What was made, by key: the latest `most`. Finding something takes no lock."""

    def __init__(self, most: int) -> None:
        self._made: dict[Any, T] = {}
        self._most, self._lock = most, Lock()

    def found(self, key: Any, make: Callable[[], T]) -> T:
        found = self._made.get(key, _NOTHING)
        if found is not _NOTHING:
            return found  # type: ignore[return-value]
        made = make()
        with self._lock:
            self._made[key] = made
            if len(self._made) > self._most:
                del self._made[next(iter(self._made))]
        return made


_NOTHING = object()


class lazy(Generic[T]):  # noqa: N801 - used as a decorator, as property is
    """A property that is computed once. Before Python 3.12 functools.cached_property holds a lock while it computes."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__, self._name = compute, compute.__doc__, compute.__name__

    @overload
    def __get__(self, owner: None, kind: type) -> lazy[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: object | None, kind: type) -> lazy[T] | T:
        if owner is None:
            return self
        value = owner.__dict__[self._name] = self._compute(owner)  # found there from now on
        return value
