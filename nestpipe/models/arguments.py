"""Arguments of models: what lies outside its range is refused where it is given, not where it first hurts."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from nestpipe.batch import Jagged, Streamed

MOST = 2**31 - 1


def check_whole(model: str, least: int, **arguments: Any) -> None:
    """Raises ValueError unless each is a whole number of at least `least`, and none that no memory could hold."""
    for name, value in arguments.items():
        if not _is_whole(value) or value < least:
            raise ValueError(f"{model}: {name} must be a whole number of at least {least}, got {value!r}")
        if value > MOST:
            raise ValueError(f"{model}: {name} must be at most {MOST:,}, got {value!r}")


def check_dropout(model: str, **arguments: Any) -> None:
    """Raises ValueError unless each is a share that leaves something: 0 <= p < 1."""
    for name, value in arguments.items():
        if not is_number(value) or not 0 <= value < 1:
            raise ValueError(f"{model}: {name} must be at least 0 and below 1, got {value!r}")


def check_scores(model: str, *, normalize: Any, temperature: Any) -> None:
    """Raises ValueError unless they say how scores are made: of cosines or not, divided by what."""
    if not isinstance(normalize, bool):
        raise ValueError(f"{model}: normalize must be true or false, got {normalize!r}")
    if not is_number(temperature) or temperature <= 0:
        raise ValueError(f"{model}: temperature must be a number above 0, got {temperature!r}")


def check_names(model: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{model}: {name} must be a name, got {value!r}")


def check_widths(model: str, **arguments: Any) -> None:
    """Raises ValueError unless each is a list, perhaps empty, of whole numbers of at least 1."""
    for name, value in arguments.items():
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{model}: {name} must be a list of hidden widths, got {value!r}")
        check_whole(model, 1, **{f"{name}[{place}]": width for place, width in enumerate(value)})


def check_rows(model: str, rows: Mapping[str, Any], kind: type | tuple[type, ...], **names: str) -> None:
    """Raises ValueError unless every named feature has rows of a kind: Jagged (a sequence), Tensor (pooled), or either of two."""
    for argument, name in names.items():
        if name not in rows:
            raise ValueError(
                f"{model}: {argument} is {name!r}, which is no feature; there are {', '.join(rows) or 'none'}"
            )
        if not isinstance(rows[name], kind):
            wanted = {
                Jagged: "one row per key, at once: pooling=None, not streamed",
                Tensor: "one row per sample: pooling='sum'",
                (Jagged, Streamed): "one row per key: pooling=None",
                (Jagged, Tensor): "one row per key (pooling=None, not streamed) or per sample (pooling='sum')",
            }[kind]
            raise ValueError(f"{model}: feature {name!r} must have {wanted}")


def check_labels(labels: Tensor | Jagged) -> None:
    """Raises ValueError unless all are from 0 to 1."""
    values = labels.values if isinstance(labels, Jagged) else labels
    wrong = ~((values >= 0) & (values <= 1))  # written so that NaN is wrong too
    if wrong.any():
        place = int(wrong.nonzero()[0])
        sample = int(labels.sample_ids()[place]) if isinstance(labels, Jagged) else place
        raise ValueError(
            f"label {values[place].item()} of sample {sample} is outside [0, 1]; "
            f"clean the data or map the labels to click = 1, no click = 0"
        )


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
