"""Serving what was trained, in plain processes: no process group, no engine, nothing of the trainer.

`bundle` answers from an exported bundle: predictions, rows, the next items. `manifest` says what a bundle holds, `rows` finds
rows in its mapped files, `lookup` makes of them what a model gets, `recommend` ranks a whole catalogue.
"""
