"""Stored results as one HTML page and as plots, and old results beside new ones. `tilewise bench --report`."""
