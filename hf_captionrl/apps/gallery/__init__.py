"""Captions of several systems side by side, with their errors marked."""
