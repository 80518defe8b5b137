"""What a process of the pool raises, prints or dies of reaches the test that asked for it."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import pytest
import torch.distributed as dist

from tests.parallel.pool import Pool


def _expects_in_vain() -> None:
    with pytest.raises(ValueError, match="this"):
        pass


def test_what_pytest_raises_is_told(pool: Pool) -> None:
    with pytest.raises(AssertionError, match=r"_expects_in_vain[\s\S]*DID NOT RAISE"):
        pool.run(_expects_in_vain)


def _one_aborts() -> None:
    if dist.get_rank() == 1:
        os.write(2, b"a library's last words\n")
        os.abort()


def _sleeps() -> None:
    time.sleep(60)


def test_how_a_process_ended_is_told_and_it_is_asked_nothing_more() -> None:
    pool = Pool(2, meshes=False, afresh=True)
    try:
        with pytest.raises(AssertionError, match=r"rank 1 ended with -6:\n[\s\S]*last words[\s\S]*in _one_aborts"):
            pool.run(_one_aborts)
        with pytest.raises(AssertionError, match="ended in a test before this one"):
            pool.run(_one_aborts)
    finally:
        pool.close()


def test_where_a_process_hangs_is_told() -> None:
    pool, begun = Pool(1, meshes=False, patience=20), time.monotonic()
    try:
        with suppress(AssertionError):
            pool.run(_expects_in_vain)  # it has begun
        pool.patience = 0.5
        with pytest.raises(AssertionError, match=r"rank 0 gave no answer within 0 s; [\s\S]*in _sleeps"):
            pool.run(_sleeps)
    finally:
        pool.close()
    assert time.monotonic() - begun < 30
