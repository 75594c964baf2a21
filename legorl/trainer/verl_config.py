"""verl's configuration, composed from verl's own defaults and our typed tree.

This is the only file that knows verl's keys. `backend.verl_overrides` is applied last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from legorl.config.schema import Config
from legorl.errors import UserError


def _actor(config: Config) -> dict[str, Any]:
    algo, backend = config.algo, config.backend
    prefix = "actor_rollout_ref.actor"
    asynchronous = config.schedule.mode == "async"
    values: dict[str, Any] = {
        f"{prefix}.strategy": "fsdp2",
        # verl's asynchronous trainer updates once per sampled batch.
        f"{prefix}.ppo_mini_batch_size": algo.tasks_per_step
        if asynchronous
        else algo.tasks_per_step // algo.minibatches,
        f"{prefix}.use_dynamic_bsz": True,
        f"{prefix}.ppo_max_token_len_per_gpu": backend.microbatch_tokens,
        f"{prefix}.ppo_epochs": 1,
        f"{prefix}.shuffle": True,
        f"{prefix}.data_loader_seed": config.seed,
        f"{prefix}.policy_loss.loss_mode": algo.loss,
        # Row weights (legorl.algo.advantage) turn this mean over rows into one vote per trial.
        f"{prefix}.loss_agg_mode": "seq-mean-token-mean",
        f"{prefix}.clip_ratio_low": algo.clip_low,
        f"{prefix}.clip_ratio_high": algo.clip_high,
        f"{prefix}.entropy_coeff": algo.entropy_coef,
        f"{prefix}.use_kl_loss": algo.kl_coef > 0,
        f"{prefix}.kl_loss_coef": algo.kl_coef,
        f"{prefix}.grad_clip": algo.grad_clip,
        f"{prefix}.optim.lr": algo.learning_rate,
        f"{prefix}.optim.lr_warmup_steps": algo.warmup_steps,
        f"{prefix}.optim.lr_scheduler_type": algo.lr_schedule,
        f"{prefix}.optim.weight_decay": algo.weight_decay,
        f"{prefix}.optim.betas": list(algo.betas),
        f"{prefix}.use_torch_compile": backend.device != "cpu",
        f"{prefix}.fsdp_config.use_torch_compile": backend.device != "cpu",
        f"{prefix}.fsdp_config.seed": config.seed,
        f"{prefix}.fsdp_config.mixed_precision": {
            "param_dtype": backend.param_dtype,
            "reduce_dtype": "fp32",
            "buffer_dtype": "fp32",
        },
        # verl asks for a name that it knows; the advantages themselves are computed in trainers.py.
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
    }
    if backend.router_replay:
        values[f"{prefix}.fsdp_config.router_replay"] = {
            "_target_": "verl.workers.config.EngineRouterReplayConfig",
            "mode": "R3",
        }
    return values


def _rollout(config: Config, run_dir: Path) -> dict[str, Any]:
    engine = config.engine
    cpu = config.backend.device == "cpu"
    prefix = "actor_rollout_ref.rollout"
    values: dict[str, Any] = {
        f"{prefix}.name": "vllm",
        f"{prefix}.n": config.algo.group_size,
        f"{prefix}.tensor_model_parallel_size": 1,
        f"{prefix}.dtype": engine.dtype,
        f"{prefix}.max_model_len": engine.max_model_len,
        f"{prefix}.max_num_seqs": engine.max_num_seqs,
        f"{prefix}.max_num_batched_tokens": engine.max_batched_tokens,
        f"{prefix}.temperature": engine.temperature,
        f"{prefix}.top_p": engine.top_p,
        f"{prefix}.top_k": engine.top_k,
        f"{prefix}.seed": config.seed,
        f"{prefix}.val_kwargs.temperature": engine.temperature,
        f"{prefix}.val_kwargs.top_p": engine.top_p,
        f"{prefix}.val_kwargs.top_k": engine.top_k,
        f"{prefix}.val_kwargs.do_sample": True,
        f"{prefix}.val_kwargs.n": 1,
        f"{prefix}.calculate_log_probs": True,
        f"{prefix}.enable_rollout_routing_replay": config.backend.router_replay,
        f"{prefix}.load_format": "auto",
        f"{prefix}.checkpoint_engine.update_weights_bucket_megabytes": 64,
        f"{prefix}.agent.num_workers": 1,
        f"{prefix}.agent.default_agent_loop": "trial",
        f"{prefix}.agent.agent_loop_config_path": str(_write_agent_loop(run_dir)),
    }
    if cpu:
        values |= {
            f"{prefix}.enforce_eager": True,
            f"{prefix}.enable_sleep_mode": False,
            f"{prefix}.free_cache_engine": False,
            f"{prefix}.engine_kwargs.vllm": {
                "worker_extension_cls": "legorl.trainer.vllm_worker.CpuWorkerExtension",
                # By class path: vLLM's CPU platform turns the plain name back into a process pool.
                "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            },
        }
    return values


def _write_agent_loop(run_dir: Path) -> Path:
    file = run_dir / "agent_loop.yaml"
    entry = {"name": "trial", "_target_": "legorl.trainer.agent_loop.TrialAgentLoop", "run_dir": str(run_dir)}
    OmegaConf.save(OmegaConf.create([entry]), file)
    return file


def _schedule(config: Config) -> dict[str, Any]:
    values: dict[str, Any] = {
        "trainer.v1.sampler.custom_sampler": {
            "path": "pkg://legorl.trainer.replay_buffer",
            "name": "FastReplayBuffer",
        }
    }
    if config.schedule.mode == "sync":
        return values | {"trainer.v1.trainer_mode": "sync"}
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    values["trainer.v1.sampler.custom_sampler"]["name"] = "FastReplayBufferAsync"
    return values | {
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.parameter_sync_step": 1,
        # verl counts the step itself: staleness s is threshold s + 1.
        "trainer.v1.sampler.max_off_policy_threshold": config.schedule.max_staleness + 1,
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        f"{engine}.backend": "legorl_zmq",
        f"{engine}.custom_backend_module": "legorl.trainer.checkpoint_engine",
    }


def _trainer(config: Config, run_dir: Path) -> dict[str, Any]:
    run = config.run
    return {
        "trainer.device": config.backend.device,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": config.backend.world_size,
        "trainer.logger": ["console"],
        "trainer.project_name": config.tracking.experiment,
        "trainer.experiment_name": run_dir.name,
        "trainer.total_epochs": 1_000_000,
        "trainer.total_training_steps": run.steps,
        "trainer.val_before_train": run.heldout_every > 0,
        "trainer.test_freq": run.heldout_every if run.heldout_every > 0 else -1,
        "trainer.save_freq": run.checkpoint_every or run.steps,
        "trainer.resume_mode": "auto",
        "trainer.default_local_dir": str(run_dir / "checkpoints"),
        "reward.num_workers": 0,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }


def _data(config: Config, run_dir: Path) -> dict[str, Any]:
    return {
        "data.train_files": str(run_dir / "train.parquet"),
        "data.val_files": str(run_dir / "heldout.parquet"),
        "data.train_batch_size": config.algo.tasks_per_step,
        "data.max_prompt_length": config.engine.max_model_len - config.engine.reply_tokens,
        "data.max_response_length": config.engine.reply_tokens,
        "data.dataloader_num_workers": 0,
        "data.filter_overlong_prompts": False,
        "data.shuffle": True,
        "data.seed": config.seed,
    }


def _model(config: Config, policy: Path) -> dict[str, Any]:
    return {
        "actor_rollout_ref.model.path": str(policy),
        # Without a variable-length attention kernel a packed batch costs the square of its length.
        "actor_rollout_ref.model.use_remove_padding": config.backend.device != "cpu",
        "actor_rollout_ref.model.enable_gradient_checkpointing": config.backend.device != "cpu",
        "actor_rollout_ref.model.override_config.attn_implementation": (
            "sdpa" if config.backend.device == "cpu" else "flash_attention_2"
        ),
    }


def _ray(config: Config, ray_dir: Path, python: str | None) -> dict[str, Any]:
    if config.backend.device != "cpu":
        return {}
    values: dict[str, Any] = {
        # Virtual resources: verl places by GPU, and no task may wait for one of two real cores.
        "ray_kwargs.ray_init.num_cpus": 32,
        "ray_kwargs.ray_init.num_gpus": 4,
        "ray_kwargs.ray_init.include_dashboard": False,
        "ray_kwargs.ray_init._temp_dir": str(ray_dir),
        "ray_kwargs.ray_init.object_store_memory": config.launcher.object_store_mb * 1_000_000,
    }
    if python is not None:
        values["ray_kwargs.ray_init.runtime_env"] = {"py_executable": python}
    return values


def build(config: Config, run_dir: Path, policy: Path, ray_dir: Path, python: str | None) -> DictConfig:
    """verl's tree for this run.

    Args:
        config: ours, checked.
        run_dir: the run's directory.
        policy: Hugging Face directory of the starting policy.
        ray_dir: short path for Ray's sockets.
        python: executable for Ray's workers, None for the running one.

    Raises:
        UserError: an override names a key that verl does not have, or is malformed.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException

    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            tree = compose("ppo_trainer", overrides=list(config.backend.verl_overrides))
    except HydraException as error:
        raise UserError(f"backend.verl_overrides does not fit verl's configuration: {error}") from error
    overridden = {item.lstrip("+~").split("=", 1)[0] for item in config.backend.verl_overrides}
    values = (
        _actor(config)
        | _rollout(config, run_dir)
        | _schedule(config)
        | _trainer(config, run_dir)
        | _data(config, run_dir)
        | _model(config, policy)
        | _ray(config, ray_dir, python)
    )
    OmegaConf.set_struct(tree, False)
    for key, value in values.items():
        if key not in overridden:
            OmegaConf.update(tree, key, value, merge=True)
    assert isinstance(tree, DictConfig)
    return tree
