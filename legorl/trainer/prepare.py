"""What a run needs before its job starts: task pool, harness runtime, starting policy; built when missing.

Invariant: all of it is cached by content or version, so the second run of a kind prepares nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from legorl.config.schema import Config
from legorl.errors import UserError
from legorl.harness.registry import get_harness
from legorl.policy.build import build_policy, policy_path
from legorl.tasks.pool import Pool
from legorl.tasks.scratch import scratch
from legorl.tasks.synth import synth
from legorl.trainer import environment
from legorl.trainer.inputs import open_pool, pool_path, starting_policy, warm_start_config

Say = Callable[[str], None]

_REPORT_S = 10.0


class _Reporter:
    """A line at the start, every ten seconds, and at the end of a long piece of work."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._what = ""
        self._last = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what or now - self._last >= _REPORT_S or done == total:
            self._what, self._last = what, now
            self._say(f"  {what}: {done}/{total}")


def prepare(config: Config, say: Say) -> None:
    """Build what is missing.

    Args:
        config: checked.
        say: takes lines for the user.

    Raises:
        UserError: something cannot be had on this machine, or the policy's template does not work.
        InfrastructureError: trials of the warm start failed.
    """
    environment.set_up(config)
    # torch imports it with vLLM, and it refuses to load once something else has imported distutils.
    import setuptools  # noqa: F401

    if config.model.path:  # a template that cannot work is known before anything else is made
        _check_template(Path(config.model.path), config)
    get_harness(config.harness)  # so is an adapter that cannot be imported
    pool = _pool(config, say)
    cache = Path(config.paths.cache)
    _install(config, cache, say)
    if not config.model.path:
        _policy(config, pool, cache, say)
    policy = starting_policy(config, pool)
    if not config.model.path:
        _check_template(policy, config)


def _check_template(policy: Path, config: Config) -> None:
    # Imported here: vLLM reads the environment that `set_up` made.
    from legorl.engine.vllm_parser import vllm_parser
    from legorl.proxy.check import check_template
    from legorl.proxy.render import Renderer

    check_template(Renderer.load(policy), vllm_parser(config.model, policy))


def _pool(config: Config, say: Say) -> Pool:
    path = pool_path(config)
    if not (path / "pool.json").exists():
        if Path(config.tasks.pool).is_absolute():
            raise UserError(f"tasks.pool={config.tasks.pool}: there is no pool in that directory.")
        say(f"tasks: making and validating pool {config.tasks.pool} (seed {config.tasks.seed})")
        report = _Reporter(say)
        synth(
            config.tasks.pool,
            config.tasks.seed,
            config.tasks.train,
            config.tasks.heldout,
            path,
            progress=lambda done, total: report("validated", done, total),
        )
    pool = open_pool(config)
    for split, wanted in (("train", config.tasks.train), ("heldout", config.run.heldout_tasks)):
        if len(pool.tasks(split)) < wanted:
            raise UserError(
                f"The pool in {path} has {len(pool.tasks(split))} {split} tasks, {wanted} are asked for: "
                f"lower tasks.{split} (and run.heldout_tasks), or choose another tasks.seed."
            )
    return pool


def _install(config: Config, cache: Path, say: Say) -> None:
    needed = [config.harness]
    if not config.model.path and config.model.warm_start.episodes:
        needed.append(warm_start_config(config).harness)
    for harness in (get_harness(entry) for entry in needed):
        try:
            harness.mounts(cache)
        except UserError:
            say(f"harness: installing {harness.name} {harness.version}")
            harness.install(cache)


def _policy(config: Config, pool: Pool, cache: Path, say: Say) -> None:
    base = warm_start_config(config)
    place = policy_path(base, pool)
    if (place / "config.json").exists():
        return
    from legorl.engine.vllm_parser import vllm_parser
    from legorl.policy.capture import HarnessCapture

    say(f"policy: warm start of {config.model.name} on transcripts of the scripted expert")
    with scratch(cache, ".capture-") as directory:
        capture = HarnessCapture(
            base,
            pool.tasks("train"),
            directory,
            lambda model: vllm_parser(config.model, model),
        )
        build_policy(base, pool, capture, _Reporter(say))
