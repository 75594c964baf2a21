"""The pod that a configuration and a policy give, as the object that goes to the API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from legorl.config.compose import compose
from legorl.config.schema_kubernetes import KubernetesConfig, LazyConfig
from legorl.errors import UserError
from legorl.sandbox.base import Limits, Mount, SandboxSpec
from legorl.sandbox.kubernetes_pod import (
    PodMaker,
    check_config,
    label_value,
    lazy_name,
    load_template,
    pod_name,
)
from legorl.sandbox.policy import load_policy

MOUNTS = (Mount(Path("/cache/harness"), "/opt/harness"), Mount(Path("/cache/tool"), "/opt/tool"))


def pod_of(
    config: KubernetesConfig | None = None,
    *,
    off: tuple[str, ...] = (),
    spec: SandboxSpec | None = None,
    template: dict[str, Any] | None = None,
) -> dict[str, Any]:
    config = config or KubernetesConfig(guard_image="guard:1")
    labels = {"legorl.dev/run": "r", "legorl.dev/owner": "o"}
    maker = PodMaker(
        config, load_policy("strict", off), template or load_template(config.pod), labels, "task:1"
    )
    return maker.make("p", spec or SandboxSpec("trial 7/a", Path("/w"), MOUNTS, limits=Limits(512, 40, 64)))


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [c for c in pod["spec"]["containers"] if c["name"] == name]
    return dict(found)


def test_everything_a_configuration_says_is_in_the_pod() -> None:
    config = KubernetesConfig(
        guard_image="guard:1",
        cpu=2.0,
        cpu_request=0.5,
        memory_request_mb=128,
        node_selector=["pool=trials"],
        runtime_class="kata",
        pull_policy="Never",
        pull_secrets=["registry"],
        priority_class="low",
        labels=["team=t"],
        ttl_s=99.0,
    )
    pod = pod_of(config)
    spec, agent = pod["spec"], container(pod, "agent")
    assert pod["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "legorl",
        "team": "t",
        "legorl.dev/run": "r",
        "legorl.dev/owner": "o",
        "legorl.dev/trial": "trial-7-a",
    }
    assert spec["nodeSelector"] == {"pool": "trials"} and spec["runtimeClassName"] == "kata"
    assert spec["priorityClassName"] == "low" and spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["activeDeadlineSeconds"] == 99 and spec["restartPolicy"] == "Never"
    assert agent["image"] == "task:1" and agent["imagePullPolicy"] == "Never"
    assert agent["resources"] == {
        "requests": {"cpu": "0.5", "memory": "128Mi"},
        "limits": {"cpu": "2.0", "memory": f"{512 + 64 + 64}Mi"},
    }
    assert container(pod, "guard")["image"] == "guard:1"
    assert "runtimeClassName" not in pod_of()["spec"]


def test_the_policy_is_in_the_pod_whatever_the_template_says() -> None:
    template = load_template("agent")
    template["spec"]["automountServiceAccountToken"] = True
    template["spec"]["hostNetwork"] = True
    template["spec"]["containers"][1]["securityContext"] = {"privileged": True, "runAsUser": 0}
    pod = pod_of(template=template)
    spec, context = pod["spec"], container(pod, "agent")["securityContext"]
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert spec["hostNetwork"] is False and spec["dnsPolicy"] == "None"
    assert context == {
        "privileged": False,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert [v for v in spec["volumes"] if "hostPath" in v] == [
        {"name": "mount0", "hostPath": {"path": "/cache/harness"}},
        {"name": "mount1", "hostPath": {"path": "/cache/tool"}},
    ]
    guard_only = {m["name"] for m in container(pod, "guard")["volumeMounts"]}
    assert guard_only == {"guard"}
    assert "guard" not in {m["name"] for m in container(pod, "agent")["volumeMounts"]}


def test_a_rule_that_is_off_is_not_in_the_pod() -> None:
    assert pod_of(off=("no_credentials",))["spec"]["automountServiceAccountToken"] is True
    assert "dnsPolicy" not in pod_of(off=("network_closed",))["spec"]
    assert "capabilities" not in container(pod_of(off=("no_privileges",)), "agent")["securityContext"]
    assert "resources" not in container(pod_of(off=("limits",)), "agent")
    open_pod = pod_of(off=("host_invisible", "runtime_read_only"))
    mounts = {m["mountPath"]: m["readOnly"] for m in container(open_pod, "agent")["volumeMounts"][-3:]}
    assert mounts == {"/opt/harness": False, "/opt/tool": False, "/host": True}


def test_a_runtime_comes_from_an_image() -> None:
    copied = pod_of(KubernetesConfig(guard_image="g", runtime="init_copy", runtime_image="runtime:2"))
    (init,) = copied["spec"]["initContainers"]
    assert init["image"] == "runtime:2" and init["command"][-2:] == ["/opt/harness", "/opt/tool"]
    expected = {"name": "runtime", "mountPath": "/opt/tool", "subPath": "opt/tool", "readOnly": True}
    assert expected in container(copied, "agent")["volumeMounts"]
    mounted = pod_of(KubernetesConfig(guard_image="g", runtime="image_volume", runtime_image="runtime:2"))
    volume = {"name": "runtime", "image": {"reference": "runtime:2", "pullPolicy": "IfNotPresent"}}
    assert volume in mounted["spec"]["volumes"] and "initContainers" not in mounted["spec"]
    assert expected in container(mounted, "agent")["volumeMounts"]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("docker.io/library/python:3.11", "mirror:5000/hub/library/python:3.11-nydus"),
        ("docker.io/library/python", "mirror:5000/hub/library/python:latest-nydus"),
        ("docker.io/special/a:1", "mirror:5000/s/a:1-nydus"),
        ("docker.io.example/a:1", "docker.io.example/a:1-nydus"),
        ("registry:5000/a", "registry:5000/a:latest-nydus"),
        ("docker.io/a@sha256:00", "mirror:5000/hub/a@sha256:00"),
    ],
)
def test_names_of_lazy_images(image: str, expected: str) -> None:
    mirrors = ["docker.io=mirror:5000/hub", "docker.io/special=mirror:5000/s"]
    assert lazy_name(image, LazyConfig(mirrors=mirrors, suffix="-nydus")) == expected
    assert lazy_name(image, LazyConfig()) == image


def test_lazy_images_reach_the_pod_from_the_command_line() -> None:
    config = compose(
        [
            "sandbox=kubernetes",
            "sandbox.kubernetes.guard_image=g",
            "sandbox.kubernetes.lazy.suffix=-nydus",
            "sandbox.kubernetes.lazy.annotations=['containerd.io/snapshotter=nydus']",
            "sandbox.kubernetes.lazy.runtime_class=nydus",
        ]
    ).sandbox.kubernetes
    pod = pod_of(config)
    assert pod["metadata"]["annotations"] == {"containerd.io/snapshotter": "nydus"}
    assert container(pod, "agent")["image"] == "task:1-nydus" and container(pod, "guard")["image"] == "g"
    assert pod["spec"]["runtimeClassName"] == "nydus"


def test_names_and_labels_are_what_kubernetes_takes() -> None:
    assert pod_name("Step 3/Task_É.7", "ff") == "legorl-step-3-task-7-ff"
    assert len(pod_name("x" * 300, "0" * 10)) <= 63
    assert pod_name("é", "ff") == "legorl-ff"
    assert label_value("a/b c_" + "x" * 80) == "x" * 63 and label_value("-a-") == "a"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("spec: 1", "is no pod template"),
        ("spec: {containers: [{name: agent}]}", "lacks the container 'guard'"),
    ],
)
def test_a_wrong_template_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "t.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_template(str(path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KubernetesConfig(), "guard_image is empty"),
        (KubernetesConfig(guard_image="g", labels=["team"]), "labels has 'team': write name=value"),
        (KubernetesConfig(guard_image="g", runtime="copy"), "runtime=copy: use host_path"),
        (KubernetesConfig(guard_image="g", runtime="init_copy"), "needs sandbox.kubernetes.runtime_image"),
    ],
)
def test_a_configuration_that_gives_no_pod_is_refused(config: KubernetesConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_config(config)
