"""One file per metric of `evaluate.load`; each declares its `METRIC`."""
