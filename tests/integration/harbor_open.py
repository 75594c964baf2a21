"""An environment of Harbor that cannot close the network, as some of its providers'."""

from __future__ import annotations

from harbor.environments.capabilities import EnvironmentCapabilities

from legorl.sandbox.harbor_local import LocalEnvironment


class OpenEnvironment(LocalEnvironment):
    """The local one without that ability, without mounts, and not root either."""

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """None."""
        return EnvironmentCapabilities()
