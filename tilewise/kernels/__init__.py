"""The kernel systems: one folder each, listed in dispatch.py."""
