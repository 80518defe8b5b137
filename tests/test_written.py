"""Variants written as Python: modules in memory, that compilers, tracebacks and people can read, and bounded."""

from __future__ import annotations

import errno
import gc
import importlib.util
import inspect
import linecache
import os
import py_compile
import subprocess
import sys
import traceback
import weakref
from pathlib import Path

import pytest

from tests.faults import every_step, failing
from tilewise.kernels import written

ROOT = Path(__file__).parent.parent
TEXT = "def score(x):\n    return x + 1\n\n\ndef fails(x):\n    return x / 0  # here\n"


def test_a_text_is_a_module_once() -> None:
    made = written.module("triton", TEXT)
    assert made.score(1) == 2
    assert written.module("triton", TEXT) is made
    assert written.module("cute", TEXT) is not made


def test_compilers_and_tracebacks_find_the_text() -> None:
    made = written.module("triton", TEXT)
    assert inspect.getsource(made.score) == "def score(x):\n    return x + 1\n"
    assert inspect.getsource(made) == TEXT
    linecache.checkcache()
    with pytest.raises(ZeroDivisionError) as raised:
        made.fails(1)
    assert "return x / 0  # here" in "".join(traceback.format_exception(raised.value))
    linecache.clearcache()
    assert inspect.getsource(made.score).startswith("def score"), "of the module, if nobody remembers"


def test_nothing_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    for step, found in every_step(tmp_path, lambda: written.module("triton", TEXT + "# no file\n"), errno.EROFS):
        assert step == 1 and found.score(1) == 2
    assert list(tmp_path.iterdir()) == []


def test_bytecode_that_someone_planted_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the file in which a variant's text used to be."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    text = "x = 1\n# planted\n"
    name = written.module("triton", text).__name__
    del sys.modules[name]
    source = tmp_path / "triton" / f"{name.rpartition('_')[2]}.py"
    source.parent.mkdir(exist_ok=True)
    source.write_text("x = 2\n")
    planted = importlib.util.cache_from_source(str(source))
    py_compile.compile(str(source), planted, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    source.write_text(text)
    assert written.module("triton", text).x == 1
    Path(planted).write_bytes(b"")  # as a full disk leaves it
    del sys.modules[name]
    assert written.module("triton", text).x == 1


def test_what_is_wrong_is_not_found_half_done() -> None:
    text = "x = 1\nraise ValueError('as it is')\n"
    for _ in range(2):
        with pytest.raises(ValueError, match="as it is"):
            written.module("triton", text)


def test_modules_that_nobody_uses_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more variants than are kept the first ones: their names, their texts, and they themselves."""
    monkeypatch.setattr(written, "_names", type(written._names)())
    monkeypatch.setattr(written, "MOST", 3)
    used, *others = (written.module("triton", f"def score(x):\n    return {i}\n") for i in range(10))
    gone = weakref.ref(others[0])
    files = [x.__file__ for x in others]
    del others
    gc.collect()
    assert gone() is None
    assert [x in linecache.cache for x in files] == [False] * 6 + [True] * 3
    assert sum(name in sys.modules for name in written._names) == 3
    assert inspect.getsource(used.score) == "def score(x):\n    return 0\n", "one in use keeps its text"
    score = used.score
    del used
    gc.collect()
    assert inspect.getsource(score) == "def score(x):\n    return 0\n", "and so does a function"
    for name in written._names:
        del sys.modules[name]


def test_a_text_that_is_written_again_outlives_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def score(x):\n    return 'again'\n"
    first = written.module("triton", text)
    del sys.modules[first.__name__]
    second = written.module("triton", text)
    del first
    gc.collect()
    del sys.modules[second.__name__]
    assert inspect.getsource(second.score) == text


def test_tritons_modules_are_bounded() -> None:
    """5,000 variants left 5,000 modules, and as many files."""
    pytest.importorskip("triton")
    from tilewise.kernels.triton.modules import module

    gone = weakref.ref(module(("def score(x):\n    return x\n",)))
    for i in range(written.MOST + 9):
        module((f"def score_{i}(x):\n    return x\n",))
    gc.collect()
    assert gone() is None
    assert sum(name.startswith("tilewise.kernels.triton.variant_") for name in sys.modules) <= written.MOST


_CALLS = """
import numpy as np, torch, tilewise as tw
q = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 2, 20, 16)).astype(np.float32)).requires_grad_()
got, want = (tw.attention(q, q, q, causal=True, score=tw.softcap(3.0), kernel=x) for x in ("triton", "numpy"))
got.sum().backward()
assert (got - want).abs().max() < 1e-5
"""


@pytest.mark.parametrize("home", ["a file", *(pytest.param(x, marks=pytest.mark.slow) for x in ("empty", "relative"))])
def test_triton_runs_variants_where_no_cache_can_be_written(tmp_path: Path, home: str) -> None:
    """In a container that is read-only. For the superuser, too, nothing can be made below a file."""
    pytest.importorskip("triton")
    (tmp_path / "file").touch()
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    del environment["TILEWISE_CACHE"]
    environment |= {
        "a file": {"TILEWISE_CACHE": str(tmp_path / "file" / "cache")},
        "empty": {"HOME": "", "XDG_CACHE_HOME": ""},
        "relative": {"HOME": str(tmp_path), "XDG_CACHE_HOME": "cache"},
    }[home]
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _CALLS], env=environment, cwd=work, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(work.iterdir()) == [], "nothing in the folder where it was started"


def test_cute_writes_its_variants_to_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tilewise as tw
    from tilewise.kernels.cute import modules
    from tilewise.spec import Attention

    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    text = modules.text(Attention(1.0, tw.causal(), tw.softcap(7.25)))
    with failing(tmp_path, errno.EROFS, at=1, forever=True) as faults:
        body = compile(f"{modules.operations()}\n\n{text}", "whole", "exec")  # which needs CuTe to be run
        assert body is not None and "7.25" in text
        if importlib.util.find_spec("cutlass") is not None:
            made = modules.module(text)
            assert made is not None and "7.25" in inspect.getsource(made.score)
    assert faults.steps == 0
