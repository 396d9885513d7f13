"""Cases of the metric: arguments of `compute`, and numbers that the result must hold."""

test_cases = [
    {
        "predictions": ["a pig left of a tree", "two pigs"],
        "model": "scenes:gpt2-perplexity",
        "result": {"num_tokens": 10, "num_truncated": 0},
    },
    {
        "predictions": ["a pig left of a tree"],
        "model": "scenes:gpt2-perplexity",
        "bos": "prepend",
        "result": {"num_tokens": 7, "num_truncated": 0},
    },
]
