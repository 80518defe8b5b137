"""Questions from a seed. It knows ../question.py, and nothing of the package or of what judges."""
