"""Rewards and benchmarks for other trainers and evaluators: over HTTP, as adapters, preference pairs and task folders."""
