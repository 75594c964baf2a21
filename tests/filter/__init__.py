"""Tests of the room `filter`."""
