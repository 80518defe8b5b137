"""One pool of four processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.pool import Pool


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()
