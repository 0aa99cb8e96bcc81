"""How much at once, and how far ahead: what the engine works with and the simulator counts with, so that they cannot drift."""

BUCKET_BYTES = 4 << 20  # of dense gradients that one collective sums (engine/reducer.py)
NUM_TOTALS = 9  # float64 that AGREE sums over workers (engine/context.py names them)
READ_AHEAD = 2  # batches that are read before training asks for them (engine/loader.py)
