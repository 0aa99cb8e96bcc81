"""Serving: what decides, what holds the rows, and what answers. It never imports what trains."""
