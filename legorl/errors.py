"""Every error a room raises on purpose.

Invariant: an `InfrastructureError` names a cause of `legorl.trial.termination`, so it can never be
mistaken for something the agent did. A `UserError` is somebody's mistake at the keyboard or in a file:
the command line prints it in one paragraph, without a traceback.
"""

from __future__ import annotations


class LegoError(Exception):
    """An error with a message for a person: what happened, which value, what to do."""


class UserError(LegoError):
    """A mistake in a configuration, a file or a command, or something missing on the machine."""


class InfrastructureError(LegoError):
    """Something around the trial broke; the policy is not to blame (invariant I5)."""

    cause: str = "infrastructure"


class ImageError(InfrastructureError):
    """The task's environment or the harness runtime could not be prepared."""

    cause = "image"


class SandboxStartError(InfrastructureError):
    """The sandbox did not start."""

    cause = "sandbox_start"


class SandboxExecError(InfrastructureError):
    """A command could not be executed in the sandbox (not: it exited non-zero)."""

    cause = "sandbox_exec"


class TransferError(InfrastructureError):
    """A file could not be put into or taken out of the sandbox."""

    cause = "transfer"


class IntegrityError(InfrastructureError):
    """A rule of the integrity policy could not be applied."""

    cause = "integrity"


class EngineError(InfrastructureError):
    """The inference engine failed, died or was cut off."""

    cause = "engine"


class EngineDownError(EngineError):
    """No connection to the engine: it took nothing of the request, so another engine may have it."""


class EngineLostError(EngineError):
    """An engine died with a request in flight, which nobody may answer a second time."""

    def __init__(self, message: str, *, engine: str = "", request_id: str = "") -> None:
        super().__init__(message)
        self.engine = engine
        """Name of the engine that died."""
        self.request_id = request_id
        """What it was working on."""


class ProxyError(InfrastructureError):
    """The proxy or its ledger failed, or a ledger invariant does not hold."""

    cause = "proxy"


class HarnessError(InfrastructureError):
    """The harness process broke in a way that is neither its own end state nor the policy's doing."""

    cause = "harness"


class VerifierError(InfrastructureError):
    """The verifier crashed or left no readable result."""

    cause = "verifier"


class SetupDeadlineError(InfrastructureError):
    """A phase other than the agent's ran out of time."""

    cause = "setup_deadline"


class OutageError(InfrastructureError):
    """So much of the infrastructure fails that the run cannot go on."""

    cause = "outage"
