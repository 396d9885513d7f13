"""TrueMatch: build, review and evaluate benchmarks of look-alikes."""
