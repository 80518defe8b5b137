"""Random calls for tests/fuzz.py: drawn from a seed, judged by the contract."""
