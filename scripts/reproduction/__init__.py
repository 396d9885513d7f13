"""What `scripts/reproduce.py` is made of: numbers with intervals, runs, the papers' data, and the pages."""
