"""One pool of four processes for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()
