"""Questions as one line of text, to the bit, and back: what a failure prints, and `--question` reads."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from tests.fuzzing.question import Cache, Given, Layout, LinearQuestion, Numbers, Question

MOST_NUMBERS = 48  # that are written one by one; more are packed
_KINDS: dict[str, type[Any]] = {"attention": Question, "linear": LinearQuestion}


def written(question: Question | LinearQuestion) -> str:
    """Compact JSON: the fields that are not as they are by default."""
    kind = next(name for name, made in _KINDS.items() if isinstance(question, made))
    return json.dumps({"ask": kind, **_fields(question)}, separators=(",", ":"))


def read(text: str) -> Question | LinearQuestion:
    record = json.loads(text)
    made: Question | LinearQuestion = _made(_KINDS[record.pop("ask")], record)
    return made


def _fields(x: Any) -> dict[str, Any]:
    """Of a dataclass, without what it has by default."""
    told = {f.name: getattr(x, f.name) for f in fields(x)}
    by_default = {f.name: f.default for f in fields(x) if f.default is not MISSING}
    return {
        name: _plain(value) for name, value in told.items()
        if name not in by_default or not _is(value, by_default[name])
    }  # fmt: skip


def _is(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _packed(np.asarray(value))
    if isinstance(value, Given | Layout | Cache):
        return _fields(value)
    return [_plain(x) for x in value] if isinstance(value, tuple) else value


def _packed(values: Numbers) -> dict[str, Any]:
    """An array of float64, int64 or bool."""
    told: dict[str, Any] = {"shape": list(values.shape), "of": values.dtype.kind}
    flat = np.ascontiguousarray(values).ravel()
    if flat.size and flat.tobytes() == flat[:1].tobytes() * flat.size:
        return told | {"all": flat[0].item()}
    if flat.size <= MOST_NUMBERS and not (values.dtype.kind == "f" and np.signbit(flat[np.isnan(flat)]).any()):
        return told | {"are": flat.tolist()}
    return told | {"packed": base64.b85encode(zlib.compress(flat.tobytes(), 9)).decode()}


_TYPES = {"f": np.float64, "i": np.int64, "u": np.uint64, "b": np.bool_}


def _unpacked(record: dict[str, Any]) -> Numbers:
    dtype = _TYPES[record["of"]]
    if "all" in record:
        return np.full(record["shape"], record["all"], dtype)
    if "are" in record:
        return np.array(record["are"], dtype).reshape(record["shape"])
    raw = zlib.decompress(base64.b85decode(record["packed"]))
    return np.frombuffer(raw, dtype).reshape(record["shape"]).copy()


def _made(kind: type[Any], record: dict[str, Any]) -> Any:
    return kind(**{name: _value(name, value) for name, value in record.items()})


def _value(name: str, value: Any) -> Any:
    if name == "layout":
        return _made(Layout, value)
    if name == "cache":
        return _made(Cache, value)
    if isinstance(value, dict):
        return _unpacked(value) if "of" in value else _made(Given, value)
    return tuple(_value("", x) for x in value) if isinstance(value, list) else value
