"""Tilewise inside other libraries: one module each, which imports its library only when it is imported itself."""
