"""Serving what was trained, in plain processes: no process group, no engine, nothing of the trainer.

`bundle` answers from an exported bundle: predictions, rows, the next items. `manifest` says what a bundle holds, `rows` finds
rows in its mapped files, `lookup` makes of them what a model gets, `recommend` ranks a whole catalogue.

Rankings behind a relayed prefix (docs/relay.md): `policy` decides what an instance does, out of `cache` (with `pool` and
`states`), `costs`, `trigger` and `batching`; `router` says which instance a user goes to; `load` and `fleet` simulate them.
"""
