"""What a question's results are, by rules of its own. It knows ../question.py, and nothing of the package."""
