"""The kernel systems of linear attention, a file or folder each."""
