"""Variants of the executor contract."""
