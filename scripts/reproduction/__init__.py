"""What `scripts/reproduce.py` is made of: numbers with intervals, runs, the papers' own data, and the pages."""
