"""Random calls for tests/fuzz.py: drawing/ makes a question from a seed, judging/ answers it, running/ asks kernels."""
