"""Benchmarks: our kernel systems beside their peers, in one run, on the same data. `tilewise bench` is the way in."""
