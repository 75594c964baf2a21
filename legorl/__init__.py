"""LEGO-RL: reinforcement learning of coding agents in their native harnesses."""

__version__ = "0.1.0"
