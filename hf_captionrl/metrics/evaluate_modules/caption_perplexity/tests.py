"""Cases of the metric: arguments of `compute`, and numbers that the result must hold."""

from hf_captionrl.metrics.evaluate_modules.metric import load_metric

test_cases = load_metric("caption_perplexity").cases
