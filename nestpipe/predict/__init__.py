"""`nestpipe predict`: what a run's model says of every sample of a data set, or the best items for it, as one Parquet file.

Every worker reads the batches that one worker would have, and takes some of them: so scores are the same bits, and rows in the
same order, on any number of workers. Each writes a file of its own beside the result; the first one puts them together.
"""
