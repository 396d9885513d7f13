"""Thin `evaluate` modules."""
