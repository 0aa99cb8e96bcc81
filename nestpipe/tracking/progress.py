"""Progress: a bar on a terminal, a line now and then elsewhere, and a line for every evaluation."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tqdm import tqdm

from nestpipe.callbacks import Callback
from nestpipe.engine.context import StepResult
from nestpipe.tracking.window import Window

EVERY = 1.0  # seconds between two looks at the figures
SAY_EVERY = 10.0  # seconds between lines where there is no terminal for a bar
FORMS = {"samples_per_second": "{:,.0f} samples/s", "tokens_per_second": "{:,.0f} tokens/s"}


class Progress(Callback):
    """enabled: on one worker. steps: in all, if that is known; done: of these, before."""

    def __init__(self, *, enabled: bool, steps: int | None, done: int = 0) -> None:
        self._bar: tqdm | None = None
        self.wants_predictions = enabled
        if enabled:
            terminal = sys.stderr.isatty()
            self._bar = tqdm(
                total=steps, initial=done, unit="step", mininterval=0.2, dynamic_ncols=True, disable=not terminal
            )
            self._of, self._window = "" if steps is None else f"/{steps}", Window()
            self._every = EVERY if terminal else SAY_EVERY

    def on_step(self, result: StepResult) -> None:
        if self._bar is None:
            return
        self._window.add(result)
        if self._window.seconds >= self._every:
            state = told(self._window.figures())
            self._bar.set_postfix_str(state, refresh=False)
            if self._bar.disable:
                print(f"step {result.step}{self._of}: {state}", file=sys.stderr, flush=True)
        self._bar.update(1)

    def on_evaluate(self, split: str, metrics: Mapping[str, float], step: int) -> None:
        if self._bar is not None:
            tqdm.write(f"step {step}, {split}: {in_words(metrics)}")
            self._window.leave_out()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def told(figures: Mapping[str, float]) -> str:
    """`loss 0.4512, AUC 0.7312, 20,481 samples/s`"""
    order = sorted(figures, key=lambda name: name in FORMS)  # how fast it is comes last
    return ", ".join(FORMS.get(name, f"{name} {{:.4f}}").format(figures[name]) for name in order)


def in_words(metrics: Mapping[str, float]) -> str:
    """`HR@10 0.0612, targets 22,363`: counts are whole numbers."""
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4f}" for name, value in metrics.items()
    )
