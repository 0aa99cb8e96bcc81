"""The same schedules on a model of a cluster: what a step will take on thousands of workers, before renting them.

`events` runs a schedule against costs. `costs` works them out from a Workload (what a step does, `workload`), a Profile (what
things take, `profile`), the network's forms (`network`) and key statistics (`keys`). `sweep` does so for counts of workers and
schedules, `plan` chooses among them, `fit` made the profiles of published clusters.
"""
