"""Parts of a run from a config: the data that it is fed, its evaluations, what it goes on from. `run` puts them together."""
