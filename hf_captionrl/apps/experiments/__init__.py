"""Comparisons of runs: the code that the recipes share."""
