"""TensorBoard: curves in `tensorboard` of the run folder; `tensorboard --logdir RUN` shows them, `nestpipe report RUN` too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestpipe.tracking.tracker import Tracker


class TensorBoard(Tracker):
    """A Tracker whose curves `tensorboard --logdir RUN` shows."""

    service = "TensorBoard"
    _writer: Any = None

    def open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import: only where it is used

        self._writer = SummaryWriter(str(self.folder / "tensorboard"))
        if self.params:
            self._writer.add_text("config", f"```json\n{json.dumps(self.params, indent=1, default=str)}\n```")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_checkpoint(self, path: Path, step: int) -> None:
        self._writer.add_text("checkpoint", str(path), step)

    def close(self) -> None:
        self._writer.close()
