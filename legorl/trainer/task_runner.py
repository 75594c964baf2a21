"""The Ray task that holds the trainer: verl's `TaskRunnerV1` with this project's trainers."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf


class TaskRunner:
    """Made remote by the job."""

    def run(self, config: Any) -> None:
        """Train to the end; the trainer's exception is the job's."""
        import transfer_queue as tq
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ
        from verl.utils.logging_utils import configure_verl_logging

        from legorl.trainer.trainers import AsyncTrainer, SyncTrainer

        configure_verl_logging()
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        trainer_class = SyncTrainer if config.trainer.v1.trainer_mode == "sync" else AsyncTrainer
        tq.init(config.transfer_queue)
        trainer = None
        try:
            trainer = trainer_class(config=config)
            trainer.init()
            manager = AgentLoopManagerTQ.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            trainer.fit(manager)
        except BaseException:
            if trainer is not None:
                trainer.tracker.end("failed")
            raise
        finally:
            tq.close()
