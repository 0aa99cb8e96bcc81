"""Peers timed against nestpipe in the same worker processes. `requirements*.txt` beside this file say what to install."""
