"""Peers timed against nestpipe in the same worker processes; `requirements*.txt` here say what to install."""
