"""Variants of the worker contract."""
