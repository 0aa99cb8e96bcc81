"""What rows one update behind (`semi_async`) save over `nested`, which waits for a batch's first rows and last gradients.

The same measurement as the ablation's, on links of a limited rate, with few schedules.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nestpipe.bench import ablation
from nestpipe.bench.ablation import Limited
from nestpipe.bench.contestants import Law
from nestpipe.schedule.setting import Setting
from nestpipe.sections import Section, Table


@dataclasses.dataclass(frozen=True)
class Behind(Limited):
    laws: tuple[tuple[Law, int], ...] = ((Law(1.05), 512),)
    real: tuple[bool, ...] = (False,)

    @property
    def settings(self) -> list[Setting]:
        n = self.micro_batches
        return [
            Setting("serial"),
            Setting("nested", n, clustering="taper"),
            Setting("semi_async", n, clustering="none"),
        ]


QUICK = Behind(laws=((Law(1.05), 64),), rate="100mbit", length=10, micro_batches=2, rounds=1, steps=6)


def measure(size: Behind) -> dict[str, Any]:
    return ablation.run_links(size)


def sections(results: dict[str, Any]) -> list[Section]:
    table, *_ = ablation.links_sections(results)
    assert isinstance(table, Table)
    return [dataclasses.replace(table, title="Rows one update behind, on links of a limited rate")]
