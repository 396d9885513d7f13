"""Architectures that transformers lacks."""
