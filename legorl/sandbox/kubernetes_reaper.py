"""Deletes pods whose owner is dead: at once by a process that outlives it, later by the run's next owner.

Invariant: only pods of one run are ever touched; of another owner's, only those that have ended by
themselves (a guard ends its pod when it hears nothing of its owner) or that are older than any pod may
become.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import subprocess
import sys
import time
from typing import Any

from legorl.config.schema_kubernetes import KubernetesConfig
from legorl.sandbox.kubernetes_pod import OWNER_LABEL, RUN_LABEL

_WATCH = """
import os, sys
while (said := os.read(0, 1)) not in (b'', b'.'):
    pass
if said == b'':
    sys.path.insert(0, sys.argv[1])
    from legorl.sandbox.kubernetes_reaper import main
    main(sys.argv[2], sys.argv[3])
"""
"""Waits for the word that all is done, or for its owner's death; until then it imports nothing."""
_CLOSE_S = 5.0
_REAP_S = 120.0
_AGAIN_S = 3.0
_SLACK_S = 300


class DeathWatch:
    """The process that deletes an owner's pods when the owner dies."""

    def __init__(self, config: KubernetesConfig, owner: str, source: str) -> None:
        """
        Args:
            source: directory from which `legorl` is imported.
        """
        settings = {"kubeconfig": config.kubeconfig, "context": config.context, "namespace": config.namespace}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WATCH, source, json.dumps(settings), owner],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # what ends its owner must not end it
        )

    async def close(self) -> None:
        """The owner has deleted its pods itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b".")
            self._process.stdin.close()
        try:
            await asyncio.to_thread(self._process.wait, _CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(settings: str, owner: str) -> None:
    """Delete an owner's pods, trying again for a while; nobody is there to hear of a failure but the log."""
    asyncio.run(_reap_owner(KubernetesConfig(**json.loads(settings)), owner))


async def _reap_owner(config: KubernetesConfig, owner: str) -> None:
    from legorl.sandbox.kubernetes_api import Api, ApiError

    api, end = Api(config), time.monotonic() + _REAP_S
    try:
        while time.monotonic() < end:
            try:
                for pod in await api.list_pods(f"{OWNER_LABEL}={owner}"):
                    await api.delete_pod(pod["metadata"]["name"])
                # Once more: a request to create one may have been under way.
                await asyncio.sleep(_AGAIN_S)
                if not await api.list_pods(f"{OWNER_LABEL}={owner}"):
                    return
            except ApiError as error:
                print(f"pods of {owner} could not be deleted: {error}", file=sys.stderr)
                await asyncio.sleep(_AGAIN_S)
    finally:
        await api.close()


async def reap_run(api: Any, run: str, owner: str, ttl_s: float) -> list[str]:
    """Delete what dead owners of a run left; names of the pods. Raises `ApiError`."""
    left = []
    now = datetime.datetime.now(datetime.UTC)
    for pod in await api.list_pods(f"{RUN_LABEL}={run},{OWNER_LABEL}!={owner}"):
        created = datetime.datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
        ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if ended or (now - created).total_seconds() > ttl_s + _SLACK_S:
            await api.delete_pod(pod["metadata"]["name"])
            left.append(pod["metadata"]["name"])
    return left
