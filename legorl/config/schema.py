"""Typed schema of the configuration tree: one dataclass per group, registered in Hydra's ConfigStore.

Invariant: every key of `conf/` is a field here, so an unknown key is an error; every group has a concrete
default. Values are plain (str, int, float, bool, lists): the resolved tree is all a job reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from legorl.config.schema_kubernetes import KubernetesConfig
from legorl.config.schema_providers import DockerConfig, HarborConfig, LocalConfig


@dataclass
class HarnessConfig:
    """Which agent program, and the limits handed to it."""

    name: str = MISSING
    target: str = ""
    """Import path `package.module:Class` of an adapter of your own; empty for a packaged one."""
    profile: str = "lean"
    """`lean`: few tools and a short system prompt, by the program's own settings; `stock`: as shipped."""
    turn_limit: int = 8
    deadline_s: float = 120.0
    """Of the agent phase."""
    command_timeout_s: int = 20


@dataclass
class BackendConfig:
    """Training engine."""

    name: str = MISSING
    world_size: int = 1
    device: str = "cpu"
    param_dtype: str = "fp32"
    router_replay: bool = True
    """R3: replay the engine's expert choices in the trainer (MoE only)."""
    microbatch_tokens: int = 16384
    threads: int = 1
    verl_overrides: list[str] = field(default_factory=list)
    """Escape hatch: raw overrides of verl's own tree, applied last."""


@dataclass
class PoolConfig:
    """How sandboxes are handed out, and when a run gives up on them."""

    starts_per_s: float = 0.0
    """Sandboxes started per second, with a burst of one second's worth; 0: as fast as they are asked for."""
    queue_timeout_s: float = 120.0
    """Longest wait for a place among `sandbox.concurrency`, for the start rate and for the breaker."""
    warm: int = 0
    """Sandboxes started ahead, for the next trials of the tasks that were last asked for."""
    drain_s: float = 30.0
    """At the end, how long sandboxes in use may go on before they are stopped."""
    breaker_window: int = 32
    """Phases of trials, the last so many, over which the rate of infrastructure failures is taken."""
    breaker_rate: float = 0.5
    """A rate above this pauses all starts; 1: never."""
    breaker_pause_s: float = 10.0
    """Then one start is let through to see whether things work again."""
    breaker_probes: int = 3
    """Pauses, one after another, before the run stops."""


@dataclass
class SandboxConfig:
    """Where trials run."""

    name: str = MISSING
    concurrency: int = 16
    """Trials alive at once."""
    memory_mb: int = 1024
    pids: int = 256
    disk_mb: int = 256
    start_timeout_s: float = 30.0
    transfer_timeout_s: float = 30.0
    image: str = ""
    """For tasks that name none. `dockerfile`: what `legorl tasks build` made of the task's Dockerfile; empty:
    the provider's own default."""
    policy: str = "strict"
    """Integrity policy: a name in conf/sandbox/policy/, or the path of a YAML file."""
    policy_off: list[str] = field(default_factory=list)
    """Rules of the policy to switch off, for ablations."""
    verify: str = "fresh"
    """Where to grade: `fresh`, a new sandbox with the agent's diff; `same`, the agent's own."""
    retries: int = 2
    """Times the phases setup and verify are begun again, each in a fresh sandbox, after a failure of
    infrastructure. The agent phase never is."""
    retry_delay_s: float = 1.0
    """Pause before the first of them; doubled for each further one."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    canaries: bool = True
    """Put out a made-up fix branch, reference patch and test file; an agent that reads one is on record."""
    docker: DockerConfig = field(default_factory=DockerConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    harbor: HarborConfig = field(default_factory=HarborConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)


@dataclass
class FilterConfig:
    """Which trials the update sees."""

    name: str = MISSING
    exclude_agent_deadline: bool = True
    drop_zero_variance: bool = True
    """Groups whose kept trials all have one reward give no gradient and are left out of the loss."""
    min_group: int = 2
    """Groups with fewer kept trials are left out."""
    train_threads: list[str] = field(default_factory=lambda: ["main"])


@dataclass
class AlgoConfig:
    """Advantages, loss and optimiser."""

    name: str = MISSING
    loss: str = MISSING
    """Policy loss, a name of verl's registry."""
    normalize_by_std: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    learning_rate: float = 4.0e-4
    lr_schedule: str = "cosine"
    """`cosine`: down to zero over the run; `constant`. A tiny policy that has learnt the habit is easily
    pushed out of its format by full-sized steps on the few groups that still differ."""
    warmup_steps: int = 2
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    grad_clip: float = 1.0
    tasks_per_step: int = 8
    group_size: int = 8
    minibatches: int = 4
    shuffle_rewards: bool = False
    """Control experiment: permute the rewards over the batch before advantages."""


@dataclass
class WarmStartConfig:
    """Supervised start of a tiny policy on transcripts of the scripted expert."""

    episodes: int = 600
    steps: int = 260
    batch: int = 16
    learning_rate: float = 1.5e-2
    matrix_learning_rate: float = 2.0e-2
    """Of the Muon optimiser that trains the matrices."""
    skill_share: float = 0.75
    """Share of episodes whose deciding tokens are masked: they teach how, not whether, to retry."""
    seed: int = 0


@dataclass
class ModelConfig:
    """The policy."""

    name: str = MISSING
    path: str = ""
    """A Hugging Face directory; empty for a policy that this project builds and warm-starts."""
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 0
    """0 for a dense policy."""
    experts_per_token: int = 2
    expert_size: int = 64
    mlp_size: int = 256
    vocabulary: int = 768
    max_positions: int = 16384
    tool_parser: str = "hermes"
    """Name of a vLLM tool-call parser."""
    reasoning_parser: str = ""
    """Name of a vLLM reasoning parser; empty for a policy that does not think aloud."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)


@dataclass
class EngineConfig:
    """Inference engine and sampling."""

    name: str = MISSING
    dtype: str = "bfloat16"
    max_model_len: int = 16384
    """Context window. All harnesses but mini_swe_agent begin with thousands of tokens of tools and text."""
    max_num_seqs: int = 32
    max_batched_tokens: int = 4096
    kv_cache_gb: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    reply_tokens: int = 96
    """Most tokens of one reply."""
    trial_tokens: int = 1024
    """Most sampled tokens of one trial."""
    request_timeout_s: float = 120.0


@dataclass
class TasksConfig:
    """Where tasks come from."""

    name: str = MISSING
    pool: str = MISSING
    """Name of a generator, whose pool lies below `paths.pools`, or the absolute path of a pool."""
    train: int = 240
    heldout: int = 64
    seed: int = 0
    reward: str = "binary"
    """`binary`: 1 when every hidden test passed, else 0; `share`: the share of hidden tests that passed."""


@dataclass
class ScheduleConfig:
    """How sampling and updating interleave."""

    name: str = MISSING
    mode: str = MISSING
    """`sync` or `async`."""
    max_staleness: int = 0
    """Policy versions a trial may lag behind the update that uses it."""


@dataclass
class LauncherConfig:
    """Where the job runs."""

    name: str = MISSING
    deadline_s: float = 7200.0
    stall_s: float = 300.0
    """No event for this long ends the run as failed."""
    grace_s: float = 20.0
    """Time a job has to end by itself after an interrupt; then it is killed."""
    object_store_mb: int = 300
    warm_workers: bool = True
    """Fork trainer processes from one that has imported everything (laptop only)."""


@dataclass
class TrackingConfig:
    """Where metrics go."""

    name: str = MISSING
    uri: str = ""
    """MLflow tracking URI; empty for sqlite in the run area."""
    experiment: str = "legorl"


@dataclass
class ProxyConfig:
    """The proxy between harness and engine."""

    echo: str = "sampled"
    """What a turn is in later prompts when the harness sends it back changed: `sampled`, as the policy wrote
    it; `observed` (for studies), as the harness shows it, in a row of its own."""


@dataclass
class RunConfig:
    """Length of the run and what is kept of it."""

    steps: int = 24
    heldout_every: int = 8
    """Held-out evaluation before the first step, every so many steps, and after the last."""
    heldout_tasks: int = 64
    checkpoint_every: int = 0
    """0: only after the last step."""
    name: str = ""
    """Label shown in lists and in MLflow."""


@dataclass
class PathsConfig:
    """Directories, relative to the working directory or absolute."""

    runs: str = "runs"
    cache: str = ".cache/legorl"
    """Harness runtimes, warm-started policies."""
    pools: str = ".cache/legorl/pools"


@dataclass
class Config:
    """The whole tree."""

    harness: HarnessConfig = MISSING
    backend: BackendConfig = MISSING
    sandbox: SandboxConfig = MISSING
    filter: FilterConfig = MISSING
    algo: AlgoConfig = MISSING
    model: ModelConfig = MISSING
    engine: EngineConfig = MISSING
    tasks: TasksConfig = MISSING
    schedule: ScheduleConfig = MISSING
    launcher: LauncherConfig = MISSING
    tracking: TrackingConfig = MISSING
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    run: RunConfig = field(default_factory=RunConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    seed: int = 0
