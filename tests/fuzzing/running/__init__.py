"""Puts questions to kernel systems, reduces failures, counts calls and keeps records of them."""
