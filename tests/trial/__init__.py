"""Tests of the room `trial`."""
