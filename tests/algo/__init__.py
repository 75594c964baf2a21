"""Tests of the room `algo`."""
