"""Comparisons of runs: what the recipes share."""
