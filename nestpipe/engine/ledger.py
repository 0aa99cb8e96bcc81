"""Ledger: what each batch in flight has changed for good, so that after a failure it is known whether tables lie between two
steps."""

from __future__ import annotations

from nestpipe.schedule.ops import AVERAGE, DENSE, RETRIEVE, UPDATE, WRITEBACK, Op, Schedule

LASTING = (RETRIEVE, UPDATE, AVERAGE, DENSE, WRITEBACK)  # births and counts, rows, the model, rows in a lower tier


class Ledger:
    """Of one run of batches, of which `first` is the first."""

    def __init__(self, first: int, schedule: Schedule) -> None:
        self._lasting = [name for name in LASTING if schedule.has(name)]
        self._done: dict[int, dict[str, bool]] = {}  # by batch: operations that have begun, and whether they have ended
        self._trained = first  # batches that are complete, those of earlier runs included

    def begin(self, op: Op) -> None:
        if op.name in self._lasting:
            self._done.setdefault(op.batch, {})[op.name] = False

    def end(self, op: Op) -> None:
        if op.name not in self._lasting:
            return
        of_batch = self._done[op.batch]
        of_batch[op.name] = True
        if len(of_batch) == len(self._lasting) and all(of_batch.values()):
            del self._done[op.batch]
            self._trained += 1

    def between(self, steps: int, *, failed: int, forgives: bool) -> str | None:
        """Why the tables are not as `steps` steps left them; None: they are.

        failed: the batch in which something went wrong. forgives: a batch that has only been looked up may be left out, or come
        again: its new keys have their rows, which nobody can tell from rows that are born later.
        """
        if self._trained > steps:
            return f"batch {steps} was trained on, but its end was not told"
        for batch, done in sorted(self._done.items()):
            half = next((name for name, ended in done.items() if not ended), None)
            if half is not None:
                return f"{half} of batch {batch} was cut short"
            missing = [name for name in self._lasting if name not in done]
            if missing != self._lasting[1:] or batch != failed or batch != steps or not forgives:
                return f"batch {batch} has got as far as {next(reversed(done))}, and {' and '.join(missing)} did not follow"
        return None
