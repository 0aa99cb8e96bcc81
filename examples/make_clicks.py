"""Writes a CSV file of drawn clicks in the form of public logs (Avazu's): a header, ids that are strings, a label "click".

python examples/make_clicks.py clicks.csv --rows 200000
"""

import argparse
import csv

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", default="clicks.csv")
    parser.add_argument("--rows", type=int, default=200_000)
    arguments = parser.parse_args()
    draw, size = np.random.default_rng(0), arguments.rows

    def ids(count: int, skew: float) -> np.ndarray:
        """Numbers from 0, small ones far more often."""
        return np.minimum((count ** draw.random(size)) ** skew, count - 1).astype(np.int64)

    site, app, device = ids(2_000, 1.0), ids(1_000, 1.0), ids(50_000, 0.9)
    device_type, banner = draw.integers(0, 4, size), draw.integers(0, 3, size)
    day, hour = draw.integers(21, 31, size), draw.integers(0, 24, size)
    price = np.exp(draw.normal(1.0, 1.2, size))
    # What makes people click: the site, the app on a kind of device, the hour, a price near that of most.
    taste = draw.normal(size=2_000)[site] + draw.normal(size=(1_000, 4))[app, device_type]
    logits = taste + 0.5 * np.cos((hour - 20) * np.pi / 12) - 0.5 * np.abs(np.log(price) - 1.0) - 1.5
    click = draw.random(size) < 1 / (1 + np.exp(-logits))
    with open(arguments.out, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["click", "hour", "banner_pos", "site_id", "app_id", "device_id", "device_type", "price"])
        for row in range(size):
            time = f"1410{day[row]}{hour[row]:02d}"
            on = f"s{site[row]:06x}", f"a{app[row]:06x}", f"d{device[row]:06x}" if device[row] else ""
            cost = "" if row % 20 == 0 else f"{price[row]:.2f}"  # some logs lack it
            writer.writerow([int(click[row]), time, banner[row], *on, device_type[row], cost])


if __name__ == "__main__":
    main()
