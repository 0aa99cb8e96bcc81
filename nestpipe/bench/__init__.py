"""Side-by-side measurements; the only place that may import a peer."""
