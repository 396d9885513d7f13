"""Benchmarks, one per module; found by `scripts/benchmark.py`."""
