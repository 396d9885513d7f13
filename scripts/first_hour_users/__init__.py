"""The users of `scripts/first_hour.py`, and the programs that two of them write."""
