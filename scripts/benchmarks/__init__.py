"""One benchmark a module, found by `scripts/benchmark.py`."""
