"""Trials and event logs made up for tests."""

from __future__ import annotations

import time
from pathlib import Path

from legorl.config import rundir
from legorl.tracking.events import Canary, End, EventLog, Heldout, Phase, Start, Step, Trial
from legorl.tracking.metrics import heldout_metrics, step_metrics
from legorl.trial.record import Behaviour, TrialRecord


def trial(number: int = 0, reward: float | None = 1.0, **fields: object) -> TrialRecord:
    """A solved trial submitted on green, or what `fields` make of it."""
    values: dict[str, object] = {
        "id": f"t{number}",
        "task": f"repair-{number % 4}",
        "group": f"g{number % 2}",
        "split": "train",
        "step": 1,
        "harness": "mini_swe_agent",
        "termination": "submitted",
        "detail": "",
        "excluded": False,
        "reward": reward,
        "turns": 3,
        "sampled_tokens": 40 + number,
        "rows": 1,
        "routing_coverage": 1.0,
        "behaviour": Behaviour(True, 2, 2, 1, True, True) if reward else Behaviour(True, 1, 0),
        "phase_s": {"start": 0.1, "agent": 2.0 + number, "verify": 0.3},
        "path": f"trials/step_0001/t{number}",
    }
    return TrialRecord(**(values | fields))  # type: ignore[arg-type]


def broken(number: int) -> TrialRecord:
    """A trial that infrastructure ended."""
    return trial(number, None, termination="sandbox_start", excluded=True, behaviour=Behaviour(), rows=0)


def make_history(runs: Path, steps: int = 3, name: str = "20260101-000000-aaaa") -> Path:
    """A run directory whose reward and held-out success rise; one trial of each step was excluded."""
    run_dir = runs / name
    run_dir.mkdir(parents=True)
    info = rundir.RunInfo(
        id=name, steps=steps, created=time.time() - 60, name="test", choices={"algo": "gspo"}
    )
    rundir.write_info(run_dir, info)
    log = EventLog(run_dir)
    log.write(Start(steps))
    log.write(Phase("warm_start", 30.0))
    for step in range(steps + 1):
        if step in (0, steps):
            held = [trial(n, float(n < 1 + step), step=step, split="heldout") for n in range(4)]
            for record in held:
                log.write(Trial(record))
            metrics = heldout_metrics(held)
            log.write(Heldout(step, metrics["heldout/success"], int(metrics["heldout/n"]), metrics))
        if step:
            records = [trial(n, float(n < 1 + step), step=step) for n in range(4)] + [broken(9)]
            for record in records:
                log.write(Trial(record))
            own = {"alignment/pearson": 0.999 + step / 1e4, "alignment/mean_abs": 0.01, "time_s/update": 4.0}
            log.write(Step(step, step_metrics(records) | own))
            log.write(Canary(step, 1e-5, True))
    log.write(End(steps))
    log.close()
    return run_dir
