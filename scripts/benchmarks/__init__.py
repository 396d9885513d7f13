"""What `scripts/benchmark.py` times."""
