"""What a run overlaps and what it does not, per stage and table, and why: the lines that it prints at its start."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nestpipe.engine.step import Store
from nestpipe.schedule import ops as op
from nestpipe.schedule.ops import COMPUTE, Schedule, relative
from nestpipe.schedule.setting import Setting
from nestpipe.store.disk import DiskStore
from nestpipe.tables import HotRows


def overlap(setting: Setting, schedule: Schedule, stores: Sequence[Store], device: torch.device) -> list[str]:
    tasks = {task.op.name: task for task in reversed(schedule.tasks)}

    def how(name: str) -> str:
        task = tasks[name]
        if task.lane == COMPUTE:
            return "on the compute lane (exposed)"
        return f"{relative(task.op)} hidden behind the compute of t (lane {task.lane})"

    # Rows that leave while the batch before computes have all of its time, and gradients all of the next one's.
    ahead = tasks[op.EMB].op.batch > 0 and tasks[op.EMB].lane != COMPUTE

    def exchange() -> str:
        if tasks[op.EMB].lane == COMPUTE:
            return how(op.EMB)
        if ahead:
            return f"rows {how(op.EMB)}, gradients and the update of rows behind the compute of t and t+1"
        parts = schedule.micro_batches
        if parts == 1:
            return "exposed: with one micro-batch there is no other to compute meanwhile; set micro_batches"
        return (
            f"in {parts} parts, each hidden behind the compute of other micro-batches (lane {tasks[op.EMB].lane}), but for "
            f"the first rows and the last gradients (exposed)"
        )

    def merge() -> str:
        if ahead:
            return "behind the compute of t and t+1"
        if tasks[op.MERGE].lane == COMPUTE or schedule.micro_batches == 1:
            return "exposed"
        return (
            f"in {schedule.micro_batches} parts behind the compute of other micro-batches, but for the last (exposed)"
        )

    beside = (
        "" if tasks[op.UPDATE].lane == COMPUTE else ", goes on beside the last row gradients and the update of rows"
    )
    once = (
        "each row travels once"
        if setting.window_cache
        else "a row travels for every micro-batch that uses it (no window cache)"
    )
    split = f"{schedule.micro_batches}; samples by clustering {setting.clustering!r}; {once}"
    if schedule.micro_batches == 1:
        split = "1: the batch is not cut"
    device_text = "nothing to do: the device is the CPU" if device.type == "cpu" else how(op.H2D)
    lines = [
        f"schedule {schedule.name}: {schedule.summary}",
        f"  micro-batches: {split}",
        f"  data: read ahead in a thread or process of its own; {how(op.PREFETCH)}",
        *(
            [f"  samples: dealt over workers so that all compute as long; {how(op.DEAL)}"]
            if schedule.has(op.DEAL)
            else []
        ),
        f"  copy to the device: {device_text}",
        f"  key routing: {how(op.ROUTE)}",
    ]
    for store in (store for store in stores if not isinstance(store.table, HotRows)):
        name = store.table.name
        if isinstance(store, DiskStore):
            lines.append(
                f"  lookup of table {name!r} (disk): {how(op.RETRIEVE)}, write-back {how(op.WRITEBACK)}; rows that "
                f"two neighbouring batches share go from buffer to buffer on lane {tasks[op.SYNC].lane}; {store.file.describe()}"
            )
        else:
            lines.append(
                f"  lookup of table {name!r} (memory): keys to positions {how(op.RETRIEVE)}; rows are used in place"
            )
    lines.append(f"  all-to-all of rows and gradients: {exchange()}")
    if schedule.has(op.SHARE):
        kept = "" if schedule.micro_batches == 1 else "; what all forwards keep is held until then"
        lines.append(
            f"  vectors that samples of all workers share: travel between forward and backward (exposed){kept}"
        )
    if schedule.has(op.MERGE):
        lines.append(f"  sums of gradients to other replicas: {merge()}")
    if schedule.has(op.AVERAGE):
        lines.append(f"  average over replicas: after the update ({'hidden' if ahead else 'exposed'})")
    lines += [
        f"  sum of dense gradients: begins inside the last backward{beside}",
    ]
    if schedule.stale_by:
        lines.append(f"  WARNING: rows are stale by {schedule.stale_by}: this is not synchronous training")
    return lines
