"""verl's V1 trainers with this project's advantages, held-out evaluation, canary and tracking.

Only verl's hooks are overridden: the training step itself is verl's.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

from legorl.config.resolved import load_config
from legorl.sandbox.providers import configured_policy
from legorl.tracking.events import Canary, EventLog, Heldout, Phase, Start, Step
from legorl.tracking.metrics import heldout_metrics, step_metrics
from legorl.tracking.mlflow import Tracker
from legorl.trainer import canary
from legorl.trainer.batch import advantages
from legorl.trainer.engine import AsyncClient, SyncClient
from legorl.trainer.outage import NothingToTrainError, nothing_left, stop_at_outage
from legorl.trainer.verl_metrics import alignment, translate
from legorl.trial.record import TrialRecord

CANARY_TEXT = "<|im_start|>user\nWhat is the test that fails?<|im_end|>\n<|im_start|>assistant\n"


class _TrialTrainer(PPOTrainer):  # type: ignore[misc]
    """What both schedules share."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.run_dir = Path(config.trainer.default_local_dir).parent
        self.lego = load_config(self.run_dir)
        self.events = EventLog(self.run_dir)
        self.tracker = Tracker(self.run_dir)
        self._records: list[TrialRecord] = []
        self._started = time.monotonic()

    def _servers(self) -> list[Any]:
        raise NotImplementedError

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's loop, between a start event and the end of the tracked run."""
        self.events.write(Phase("engine_start", time.monotonic() - self._started))
        policy = configured_policy(self.lego.sandbox).summary()
        self.events.write(Start(self.total_training_steps, self.global_steps, policy))
        super().fit(agent_loop_manager)
        self.tracker.end("finished")

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Advantages over trials, not rows (see `legorl.trainer.batch`)."""
        fields = ["extra_fields", "response_mask", "rollout_log_probs", "old_log_probs"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        masks = [mask.bool() for mask in data["response_mask"].unbind()]
        result = advantages(
            batch.keys,
            [bool(tag.get("is_padding", False)) for tag in batch.tags],
            list(data["extra_fields"]),
            [int(mask.sum()) for mask in masks],
            self.lego.algo,
            self.lego.filter,
            seed=self.lego.seed,
            step=self.global_steps,
        )
        stop_at_outage(result.records)
        if not any(trial.counted for trial in result.admission.trials):
            raise nothing_left(result.records, f"trials of step {self.global_steps}")
        self._records.extend(result.records)
        metrics.update(alignment(data, masks))
        rows = [mask.float() * float(value) for mask, value in zip(masks, result.per_row, strict=True)]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        output = TensorDict({"advantages": nested, "returns": nested.clone()}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=output)

    def _validate(self) -> dict[str, float]:
        """Held-out trials, sampled as in training; their rows train nothing."""
        records: list[TrialRecord] = []
        for rows in self.val_dataloader:
            rows["uid"] = np.array([str(uuid.uuid4()) for _ in rows["raw_prompt"]], dtype=object)
            batch = tu.get_tensordict(rows)
            tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
            tu.assign_non_tensor_data(batch, "validate", True)
            tags = [
                {"is_prompt": True, "status": "pending", "global_steps": self.global_steps}
                for _ in range(len(batch))
            ]
            tq.kv_batch_put(keys=list(batch["uid"]), partition_id="val", tags=tags)
            self.agent_loop_manager.generate_sequences(batch)
            done, _ = self.replay_buffer.sample(
                global_steps=self.global_steps, partition_id="val", batch_size=len(batch)
            )
            if not done.keys:
                raise NothingToTrainError(
                    f"No held-out trial after step {self.global_steps} came back; see job.log."
                )
            data = tq.kv_batch_get(
                keys=done.keys, partition_id=done.partition_id, select_fields=["extra_fields"]
            )
            records += [TrialRecord.from_json(extra["legorl_record"]) for extra in list(data["extra_fields"])]
            tq.kv_clear(keys=done.keys, partition_id=done.partition_id)
        stop_at_outage(records)
        metrics = heldout_metrics(records)
        if metrics["heldout/n"] == 0:
            raise nothing_left(records, f"held-out trials after step {self.global_steps}")
        self.events.write(
            Heldout(self.global_steps, metrics["heldout/success"], int(metrics["heldout/n"]), metrics)
        )
        self.tracker.log_heldout(self.global_steps, metrics)
        return metrics

    def _check_canary(self) -> None:
        ids = self.tokenizer(CANARY_TEXT, add_special_tokens=False)["input_ids"]
        for server in self._servers():
            result = canary.check(
                server,
                self.actor_rollout_wg,
                ids,
                dtype=self.lego.engine.dtype,
                replay=self.lego.backend.router_replay,
                step=self.global_steps,
            )
            self.events.write(Canary(self.global_steps, result.max_abs, result.ok))
            if not result.ok:
                raise RuntimeError(
                    f"After the weight sync of step {self.global_steps} engine and trainer differ by "
                    f"{result.mean_abs:.3f} nats per log-probability: the engine has not the new weights."
                )

    def on_init_end(self) -> None:
        """First sync, then the canary."""
        super().on_init_end()
        self._check_canary()

    def on_step_end(self) -> None:
        """Sync, then the canary."""
        super().on_step_end()
        self._check_canary()

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], **where: Any
    ) -> None:
        """verl's metrics, ours beside them, and the step's event."""
        super()._compute_metrics(batch, metrics, timing_raw, **where)
        step = int(where["global_steps"])
        own = step_metrics(self._records) | translate(metrics, timing_raw)
        self._records = []
        self.events.write(Step(step, own))
        self.tracker.log_step(step, own)


class SyncTrainer(_TrialTrainer, PPOTrainerSync):  # type: ignore[misc]
    """Sample, update, sync, in turn."""

    def get_llm_client(self) -> Any:
        """A client that knows its calls."""
        return self.llm_server_manager.get_client(client_cls=SyncClient)

    def _servers(self) -> list[Any]:
        return list(self.llm_server_manager.server_handles)


class AsyncTrainer(_TrialTrainer, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """Sampling goes on during updates; replies cross them (partial rollouts)."""

    def get_llm_client(self) -> Any:
        """A client that knows its calls and resumes them."""
        return self.standalone_server_manager.get_client(client_cls=AsyncClient)

    def _servers(self) -> list[Any]:
        return list(self.standalone_server_manager.server_handles)
