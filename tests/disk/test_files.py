"""Files: whole or as they were, by one writer or two, and forgotten in time."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import every_step, failing
from tilewise.cli import bench
from tilewise.kernels import disk
from tilewise.kernels.disk import Files

ROOT = Path(__file__).parent.parent.parent


def _printed_where_files_are_short(code: str) -> str:
    """By a limit that the system itself keeps: no file may be larger than 5,000 bytes."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
    command = [sys.executable, "-c", f"{limit}{code}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_of_which_the_disk_takes_a_part(tmp_path: Path) -> None:
    """The write ends in the middle, and nothing is left of it."""
    told = _printed_where_files_are_short(
        "from tilewise.kernels.disk import Files, Path\n"
        f"files = Files(Path({str(tmp_path)!r}))\nfiles.add('small', bytes(100))\n"
        "try:\n    files.add('large', bytes(100_000))\nexcept OSError as error:\n    print(error.strerror)\n"
    )
    assert told == "File too large\n"
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def _load_often(folder: str, good: bytes, bad: bytes, told: Any) -> None:
    """As two machines that share a cache do, each of which takes the other's file for bad."""
    files, made = Files(Path(folder)), 0

    def load(path: Path) -> bytes:
        content = path.read_bytes()
        if content.startswith(bad):
            raise OSError("wrong ELF class")
        return content

    for _ in range(100):
        if files.loaded("kernel", load) is None:
            files.keep("kernel", good)
            made += 1
    told.put(made)


def test_two_machines_with_one_cache_only_take_longer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    kinds = (b"a" * 1000, b"b" * 1000)
    both = [context.Process(target=_load_often, args=(str(tmp_path), *x, told)) for x in (kinds, kinds[::-1])]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    assert told.get() >= 1 and told.get() >= 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_forgetting_goes_on_where_a_folder_is(tmp_path: Path) -> None:
    files = Files(tmp_path, most=3)
    (tmp_path / "__pycache__").mkdir()
    os.utime(tmp_path / "__pycache__", (0, 0))
    for i in range(9):
        os.utime(files.add(str(i), b"code"), (i, i))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "7", "8", "__pycache__"]


def test_what_a_process_left_unfinished_goes_in_time(tmp_path: Path) -> None:
    old, new = tmp_path / ".kernel.old", tmp_path / ".kernel.new"
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    Files(tmp_path).add("kernel", b"code")
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_users_file_is_as_it_was_or_whole(tmp_path: Path, error: int) -> None:
    """Results of a long run are written again after each part of it."""
    out = tmp_path / "results.json"
    for _, found in every_step(tmp_path, lambda: bench.write({"new": 1}, out), error):
        told = {"old": 0} if isinstance(found, OSError) else {"new": 1}
        assert not isinstance(found, OSError) or found.filename == str(out)
        assert not out.exists() or json.loads(out.read_text()) == told
        bench.write({"old": 0}, out)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_users_file_of_which_the_disk_takes_a_part(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    out.write_text("as it was")
    told = _printed_where_files_are_short(
        "from tilewise.kernels.disk import Path, write_whole\n"
        f"out = Path({str(out)!r})\n"
        "try:\n    write_whole(out, bytes(100_000))\nexcept OSError as error:\n    print(error.filename)\n"
    )
    assert told == f"{out}\n"
    assert out.read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_pipes_links_and_files_in_closed_folders_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write_whole(Path(os.devnull), b"nothing")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    disk.write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"new"
    with failing(tmp_path, errno.EACCES, at=1):
        disk.write_whole(tmp_path / "file", b"newer")
    assert (tmp_path / "file").read_bytes() == b"newer"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    """To open a pipe waits for a writer. No handle stays open, however often it is asked for."""
    files = Files(tmp_path)
    os.mkfifo(tmp_path / "name") if kind == "pipe" else (tmp_path / "name").mkdir()
    command = (
        "import os; from pathlib import Path; from tilewise.kernels.disk import Files; files = Files(Path.cwd()); "
        "assert files.read('name') is None; before = os.open(os.devnull, os.O_RDONLY); os.close(before); "
        "assert [files.read('name') for _ in range(9)] == [None] * 9 and os.open(os.devnull, os.O_RDONLY) == before"
    )
    subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if kind == "pipe":
        files.add("name", b"content")
        assert files.read("name") == b"content"
