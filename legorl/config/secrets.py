"""Secrets: a value `${secret:NAME}` stays a reference everywhere it is printed, hashed or saved.

Invariant: only `resolve_secret` reads the value, where it is used.
"""

from __future__ import annotations

import os
import re

from omegaconf import OmegaConf

from legorl.errors import UserError

_REFERENCE = re.compile(r"\$\{secret:\s*(\w+)\s*\}")


def register() -> None:
    """Teach OmegaConf the reference; resolving the tree leaves it as it is."""
    OmegaConf.register_new_resolver("secret", lambda name: f"${{secret:{name}}}", replace=True)


def resolve_secret(value: str) -> str:
    """Replace each `${secret:NAME}` in `value` by the environment variable NAME.

    Raises:
        UserError: the variable is not set.
    """

    def lookup(match: re.Match[str]) -> str:
        try:
            return os.environ[match[1]]
        except KeyError:
            raise UserError(
                f"The configuration refers to the secret {match[1]}, which is not set: `export {match[1]}=…`."
            ) from None

    return _REFERENCE.sub(lookup, value)
