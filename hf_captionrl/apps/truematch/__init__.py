"""TrueMatch: build, review and evaluate benchmarks of similar images."""
