"""Serving what was trained, in plain processes: no process group, no engine, nothing of the trainer.

`bundle` answers from an exported bundle: predictions, rows, the next items. `manifest` says what a bundle holds, `rows` finds
rows in its mapped files, `lookup` makes of them what a model gets, `recommend` ranks a whole catalogue.

Rankings behind a relayed prefix (docs/relay.md): `policy` decides what an instance does, out of `cache` (with `pool` and
`states`), `signals`, `copies`, `costs`, `trigger` and `batching`; `router` says which instance a user goes to; `load` and `fleet`
simulate them.

`worker` carries it out, with threads: `messages` are what it is asked, `scoring` calls the model, `prefixes` are its books,
`warming` its first calls, `counting` its figures. `server` is `nestpipe serve`: `app` speaks HTTP (`api`: its JSON,
`exposition`: its metrics), `supervisor` keeps instances alive, each behind a `link` that speaks `frames` with the process in
`instance`. `ray_app` is the same as replicas of Ray Serve: `ray_front` speaks HTTP, `ray_ranker` is an instance.
"""
