"""Tests of the kernel system cute: its compiler needs no GPU, and runs host functions on a CPU."""
