#!/usr/bin/env python
"""Plots held-out success and submissions on green of several runs: plot_runs.py OUT.png LABEL=RUN_DIR ..."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from legorl.tracking.events import read_events

SERIES = {"held-out success": "heldout/success", "submitted on green": "heldout/green_submission"}


def main(arguments: list[str]) -> None:
    """Labels that begin with `control` are dashed."""
    out, *runs = arguments
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), sharey=True)
    for entry in runs:
        label, _, run = entry.partition("=")
        evaluations = [event for event in read_events(Path(run)) if event["kind"] == "heldout"]
        for axis, (title, metric) in zip(axes, SERIES.items(), strict=True):
            steps = [event["step"] for event in evaluations]
            values = [event["metrics"][metric] for event in evaluations]
            axis.plot(
                steps, values, "--" if label.startswith("control") else "-", marker="o", ms=3, label=label
            )
            axis.set(title=title, xlabel="step", ylim=(0, 1))
            axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1:])
