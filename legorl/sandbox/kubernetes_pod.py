"""The pod of a trial: the template of `conf/sandbox/pod/`, filled in.

Invariant: what the integrity policy asks of the pod is set here and not in the template, so no template can
loosen it; a rule that is switched off is not set.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from legorl.config.schema_kubernetes import KubernetesConfig, LazyConfig
from legorl.errors import UserError
from legorl.sandbox import layout
from legorl.sandbox.base import Mount, Rules, SandboxSpec
from legorl.sandbox.kubernetes_bundle import hold_command

AGENT, GUARD = "agent", "guard"
RUN_LABEL, OWNER_LABEL, TRIAL_LABEL = "legorl.dev/run", "legorl.dev/owner", "legorl.dev/trial"
_PLACE = "/run/legorl"
_OVERHEAD_MB = 64
"""Memory of the agent's container beyond what its commands may use."""
_RUNTIMES = ("host_path", "init_copy", "image_volume")


def load_template(name: str) -> dict[str, Any]:
    """Read a pod template: a packaged name, or the path of a YAML file.

    Raises:
        UserError: there is none, or it lacks one of the two containers.
    """
    packaged = Path(import_module("legorl.conf").__path__[0]) / "sandbox" / "pod"
    path = Path(name) if name.endswith((".yaml", ".yml")) else packaged / f"{name}.yaml"
    about = f"sandbox.kubernetes.pod={name}"
    try:
        template = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
        names = {container["name"] for container in template["spec"]["containers"]}
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in packaged.glob("*.yaml")))
        raise UserError(f"{about}: {path} cannot be read ({error.strerror}). Packaged: {known}.") from error
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise UserError(f"{about}: {path} is no pod template: {error}") from error
    if missing := {AGENT, GUARD} - names:
        raise UserError(f"{about}: {path} lacks the container {sorted(missing)[0]!r}.")
    return template


def pairs(key: str, texts: Sequence[str]) -> dict[str, str]:
    """`name=value` texts of a configuration key. Raises `UserError` for one that is none."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UserError(f"sandbox.kubernetes.{key} has {text!r}: write name=value.")
        found[name] = value
    return found


def _longest(pair: tuple[str, str]) -> int:
    return -len(pair[0])


def lazy_name(image: str, lazy: LazyConfig) -> str:
    """The image's name where its lazily loaded twin lies: another registry, a suffix of the tag.

    A name with a digest gets no suffix: the digest says exactly which image it is.
    """
    for prefix, mirror in sorted(pairs("lazy.mirrors", lazy.mirrors).items(), key=_longest):
        if image == prefix or image.startswith(f"{prefix}/"):
            image = mirror + image[len(prefix) :]
            break
    if not lazy.suffix or "@" in image:
        return image
    repository, slash, last = image.rpartition("/")
    last = f"{last}{lazy.suffix}" if ":" in last else f"{last}:latest{lazy.suffix}"
    return f"{repository}{slash}{last}"


@dataclass(frozen=True)
class PodMaker:
    """Makes pods of one provider."""

    config: KubernetesConfig
    policy: Rules
    template: Mapping[str, Any]
    labels: Mapping[str, str]
    """Of every pod: run and owner."""
    image: str
    """For specs that name none."""

    def make(self, name: str, spec: SandboxSpec) -> dict[str, Any]:
        """The pod of one sandbox."""
        config, lazy = self.config, self.config.lazy
        pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(dict(self.template))}
        metadata = pod.setdefault("metadata", {})
        labels = {**pairs("labels", config.labels), **self.labels, TRIAL_LABEL: label_value(spec.trial_id)}
        metadata["name"] = name
        metadata["labels"] = {**metadata.get("labels", {}), **labels}
        annotations = pairs("lazy.annotations", lazy.annotations)
        metadata["annotations"] = {**metadata.get("annotations", {}), **annotations}
        body = pod["spec"]
        body |= {
            "restartPolicy": "Never",
            "shareProcessNamespace": True,  # the guard finds the agent's container by a process of it
            "activeDeadlineSeconds": int(config.ttl_s),
            "terminationGracePeriodSeconds": 0,
        }
        closed = self.policy.holds("no_credentials")
        body |= {"automountServiceAccountToken": not closed, "enableServiceLinks": not closed}
        if self.policy.holds("network_closed"):
            body |= {"hostNetwork": False, "dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
        for key, value in (
            ("nodeSelector", pairs("node_selector", config.node_selector)),
            ("runtimeClassName", config.runtime_class or lazy.runtime_class),
            ("priorityClassName", config.priority_class),
            ("imagePullSecrets", [{"name": secret} for secret in config.pull_secrets]),
        ):
            if value:
                body[key] = value
        containers = {container["name"]: container for container in body["containers"]}
        image = lazy_name(spec.image or self.image, lazy)
        self._agent(containers[AGENT], image, spec)
        self._guard(containers[GUARD])
        volumes = body.setdefault("volumes", [])
        volumes += [{"name": "guard", "emptyDir": {}}, {"name": "places", "emptyDir": {}}]
        self._mounts(body, containers[AGENT], spec.mounts)
        if not self.policy.holds("host_invisible"):
            volumes.append({"name": "host", "hostPath": {"path": "/"}})
            host = {"name": "host", "mountPath": layout.HOST, "readOnly": True}
            containers[AGENT]["volumeMounts"].append(host)
        return pod

    def _agent(self, container: dict[str, Any], image: str, spec: SandboxSpec) -> None:
        config = self.config
        container |= {"image": image, "imagePullPolicy": config.pull_policy}
        # The guard mounts the real ones over these, which only make the places exist.
        places = [path for path in layout.writable(spec).values() if path != "/dev/shm"]
        mounts = container.setdefault("volumeMounts", [])
        mounts += [
            {"name": "places", "mountPath": path, "subPath": str(number)}
            for number, path in enumerate(places)
        ]
        container["env"] = [*container.get("env", []), {"name": "LEGORL_CONTAINER", "value": "agent"}]
        context: dict[str, Any] = {"runAsUser": layout.UID, "runAsGroup": layout.UID, "runAsNonRoot": True}
        if self.policy.holds("no_privileges"):
            context |= {
                "privileged": False,
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }
        container["securityContext"] = {**container.get("securityContext", {}), **context}
        if self.policy.holds("limits"):
            memory = spec.limits.memory_mb + spec.limits.disk_mb + _OVERHEAD_MB
            requested = memory if config.memory_request_mb == 0 else min(config.memory_request_mb, memory)
            container["resources"] = {
                "requests": {"cpu": str(config.cpu_request), "memory": f"{requested}Mi"},
                "limits": {"cpu": str(config.cpu), "memory": f"{memory}Mi"},
            }

    def _guard(self, container: dict[str, Any]) -> None:
        config = self.config
        container |= {
            "image": config.guard_image,
            "imagePullPolicy": config.pull_policy,
            "command": hold_command(config.orphan_s),
            "securityContext": {"privileged": True, "runAsUser": 0, "runAsNonRoot": False},
        }
        container.setdefault("volumeMounts", []).append({"name": "guard", "mountPath": _PLACE})

    def _mounts(self, body: dict[str, Any], agent: dict[str, Any], mounts: tuple[Mount, ...]) -> None:
        """The harness's runtime and whatever else a spec mounts."""
        config, read_only = self.config, self.policy.holds("runtime_read_only")
        if not mounts:
            return
        if config.runtime == "host_path":
            for number, mount in enumerate(mounts):
                volume = {"name": f"mount{number}", "hostPath": {"path": str(mount.source)}}
                body["volumes"].append(volume)
                agent["volumeMounts"].append(
                    {"name": volume["name"], "mountPath": mount.target, "readOnly": read_only}
                )
            return
        volume = {"name": "runtime", "emptyDir": {}}
        if config.runtime == "image_volume":
            reference = {"reference": config.runtime_image, "pullPolicy": config.pull_policy}
            volume = {"name": "runtime", "image": reference}
        else:
            body.setdefault("initContainers", []).append(_copying(config, mounts))
        body["volumes"].append(volume)
        for mount in mounts:
            inside = mount.target.lstrip("/")
            agent["volumeMounts"].append(
                {"name": "runtime", "mountPath": mount.target, "subPath": inside, "readOnly": read_only}
            )


def _copying(config: KubernetesConfig, mounts: tuple[Mount, ...]) -> dict[str, Any]:
    """An init container that copies what a runtime image holds at the mounts' targets."""
    script = 'for path; do mkdir -p "/copy$(dirname "$path")" && cp -a "$path" "/copy$path" || exit 1; done'
    return {
        "name": "runtime",
        "image": config.runtime_image,
        "imagePullPolicy": config.pull_policy,
        "command": ["/bin/sh", "-c", script, "sh", *(mount.target for mount in mounts)],
        "volumeMounts": [{"name": "runtime", "mountPath": "/copy"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def label_value(text: str) -> str:
    """The text with what no label may hold replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[-63:].strip("._-")


def pod_name(trial_id: str, unique: str) -> str:
    """A name that no other pod has and that begins with the trial's."""
    readable = re.sub(r"[^a-z0-9]+", "-", trial_id.lower())[:40].strip("-")
    return f"legorl-{readable}-{unique}" if readable else f"legorl-{unique}"


def check_config(config: KubernetesConfig) -> None:
    """Raises `UserError` for what no pod can be made of."""
    if not config.guard_image:
        raise UserError(
            "sandbox.kubernetes.guard_image is empty: name an image with python3 (3.11 or later) and nft."
        )
    pairs("labels", config.labels)
    pairs("node_selector", config.node_selector)
    pairs("lazy.mirrors", config.lazy.mirrors)
    pairs("lazy.annotations", config.lazy.annotations)
    if config.runtime not in _RUNTIMES:
        raise UserError(f"sandbox.kubernetes.runtime={config.runtime}: use {', '.join(_RUNTIMES)}.")
    if config.runtime != "host_path" and not config.runtime_image:
        raise UserError(
            f"sandbox.kubernetes.runtime={config.runtime} needs sandbox.kubernetes.runtime_image: an image "
            "that holds the harness's runtime where it is mounted."
        )
