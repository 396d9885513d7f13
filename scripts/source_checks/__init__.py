"""The checks of `check_source.py`."""
