"""LEGO-RL: reinforcement learning of coding agents in their native harnesses."""

from pathlib import Path as _Path

__version__ = "0.1.0"

# The wheel carries conf, launchers and sweeps as legorl.conf, legorl.launchers and legorl.sweeps; in a
# checkout they lie beside this package and are found under the same names.
_checkout = _Path(__file__).parent.parent
if (_checkout / "conf" / "config.yaml").is_file():
    __path__.append(str(_checkout))
