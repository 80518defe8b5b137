"""Fixtures of the CUDA tests."""

from tests.cuda.fake_gpu import fake_gpu  # noqa: F401
