"""The part of the schema that `sandbox=kubernetes` alone reads.

Invariant: as in `schema.py`, every key has a type, a default and, where its name does not say it, a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LazyConfig:
    """Images that are loaded while they are used, by a snapshotter of the nodes."""

    mirrors: list[str] = field(default_factory=list)
    """`prefix=replacement` of image names, such as `docker.io=cache:5000/hub`."""
    suffix: str = ""
    """Appended to an image's tag: `-nydus` where converted images lie beside the plain ones."""
    annotations: list[str] = field(default_factory=list)
    """`name=value` of every pod, for the snapshotter."""
    runtime_class: str = ""
    """Whose handler uses the snapshotter; `sandbox.kubernetes.runtime_class` comes first."""


@dataclass
class KubernetesConfig:
    """Pods as sandboxes."""

    kubeconfig: str = ""
    """Path; empty: the service account of the pod this runs in, or kubectl's own default."""
    context: str = ""
    namespace: str = "default"
    pod: str = "agent"
    """Template: a name in conf/sandbox/pod/, or the path of a YAML file."""
    guard_image: str = ""
    """Of the privileged container: python3 (3.11 or later) and nft."""
    proxy_host: str = ""
    """Address of this machine that pods reach; empty: the one on the way to the API server."""
    proxy_bind: str = ""
    """Where the proxy listens, if not on that address: 0.0.0.0 behind a port-preserving translation."""
    cpu: float = 1.0
    cpu_request: float = 0.25
    memory_request_mb: int = 0
    """0: as much as the limit."""
    node_selector: list[str] = field(default_factory=list)
    """`label=value` of nodes that may run pods."""
    runtime_class: str = ""
    pull_policy: str = "IfNotPresent"
    pull_secrets: list[str] = field(default_factory=list)
    priority_class: str = ""
    labels: list[str] = field(default_factory=list)
    """`name=value` of every pod, beside those of run, owner and trial."""
    ttl_s: float = 14400.0
    """The cluster ends a pod after this time, whatever happens; longer than any trial."""
    orphan_s: float = 60.0
    """A pod ends by itself when it has not heard of this process for so long."""
    runtime: str = "host_path"
    """How a harness's runtime is mounted: `host_path`, where nodes see this machine's paths; `init_copy`,
    copied from `runtime_image` when the pod starts; `image_volume`, that image as a volume (1.31)."""
    runtime_image: str = ""
    lazy: LazyConfig = field(default_factory=LazyConfig)
