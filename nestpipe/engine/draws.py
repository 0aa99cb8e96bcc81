"""torch's global generator: the model may draw from it, its data should not.

The generator belongs to the whole process, and data is read in a thread beside the model. If both draw, each number goes to
whoever comes first, and two runs differ. Nor can a resumed run find the numbers again that its data was made of. So a source
of batches that draws while the model computes is found and told.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger("nestpipe")
T = TypeVar("T")

WATCHED = 8  # batches; all of them where that costs little
CHEAP = 30  # operations of torch for one batch: watching each costs about ten microseconds


class SourceDraws(TorchDispatchMode):
    """Sees which operations of torch in its block draw: torch itself marks those that may. They are seen below all functions
    that are made of them (dropout, distributions, initializers), and only in the thread that enters the block."""

    total = (
        0  # draws of all sources in this process, as the generator is: one more when one begins, and when it is done
    )

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.drew: str | None = None  # the first function that did

    def __enter__(self) -> SourceDraws:
        self._seed = torch.initial_seed()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if torch.initial_seed() != self._seed:  # no operation
            self.drew = self.drew or "manual_seed"
            SourceDraws.total += 2

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.calls += 1
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or _has_own_generator(*args, *kwargs.values()):
            return func(*args, **kwargs)
        SourceDraws.total += 1
        drew, before = True, torch.get_rng_state()
        try:
            result = func(*args, **kwargs)
            # Some draw in certain cases only: attention, if it has dropout. Those of accelerators have other generators.
            elsewhere = isinstance(result, Tensor) and result.device.type != "cpu"
            drew = elsewhere or not torch.equal(torch.get_rng_state(), before)
        finally:
            SourceDraws.total += 1 if drew else -1
        if drew:
            self.drew = self.drew or func.overloadpacket.__name__
        return result


def _has_own_generator(*arguments: Any) -> bool:
    # An operation gets the global one as another object of the same address.
    shared = torch.default_generator._cdata  # type: ignore[attr-defined]
    given = [value for value in arguments if isinstance(value, torch.Generator)]
    return any(generator._cdata != shared for generator in given)  # type: ignore[attr-defined]


def watched(batches: Iterable[T], *, tell: Callable[[str], object]) -> Iterator[T]:
    """The batches, as they come; tells once if making them draws from the global generator.

    What is drawn before the first one is there (a DataLoader's shuffle, say) is drawn in a fixed order: nothing computes yet.
    """
    source, watch, most, told = iter(batches), SourceDraws(), 0, False
    for number in itertools.count():
        calls = watch.calls
        with watch if number and (number <= WATCHED or most <= CHEAP) else contextlib.nullcontext():
            try:
                batch = next(source)
            except StopIteration:
                return
        most = max(most, watch.calls - calls)
        if watch.drew and not told:
            told = True
            tell(
                f"the data draws from torch's global generator ({watch.drew}, batch {number}) while the model computes: "
                f"which numbers it gets is a matter of time, so that two runs differ if the model draws too (dropout), and "
                f"a resumed run sees other data. Give the data a torch.Generator of its own, as in DataLoader(generator=...)"
            )
        yield batch


class Mark:
    """Where the global generator stands now. `moved`: whether it has been drawn from since, but for data sources: if one of
    them has, nothing can be said, and False is."""

    def __init__(self) -> None:
        self._total, self._state = SourceDraws.total, torch.get_rng_state()

    @property
    def moved(self) -> bool:
        differs = not torch.equal(torch.get_rng_state(), self._state)
        total = SourceDraws.total  # odd: one is drawing right now
        return differs and total == self._total and total % 2 == 0

    def put_back(self) -> None:
        """What was drawn since does not count. (Draws of data sources do.)"""
        if self.moved:
            torch.set_rng_state(self._state)
