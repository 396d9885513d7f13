"""Cases of the metric: arguments of `compute`, and numbers that the result must hold."""

test_cases = [
    {
        "predictions": ["a red kite in the sky", "a red kite", "a field"],
        "references": ["sky", "sky", "field"],
        "image_ids": ["sky", "field"],
        "text_features": [[0.6, 0.8], [0.8, 0.6], [1.0, 0.0]],
        "image_features": [[0.6, 0.8], [1.0, 0.0]],
        "num_bootstrap": 0,
        "result": {"recall_at_1": 1.0, "mean_rank": 1.0, "median_rank": 1.0, "ranks": [1, 1, 1], "pool_size": 2},
    },
    {
        "predictions": ["a cat", "a dog", "a bird"],
        "references": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        "text_features": [[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.8, 0.0, 0.6]],
        "num_distractors": 1,
        "num_bootstrap": 0,
        "result": {
            "recall_at_1": 0.8333333333,
            "mean_rank": 1.1666666667,
            "median_rank": 1.0,
            "ranks": [1, 1, 2],
            "pool_size": 3,
        },
    },
    {
        "predictions": ["one", "one"],
        "references": [[1.0, 0.0], [0.0, 1.0]],
        "text_features": [[0.6, 0.6], [0.6, 0.6]],
        "bags": [[0, 1]],
        "num_bootstrap": 0,
        "result": {"recall_at_1": 0.0, "mean_rank": 2.0, "median_rank": 2.0, "ranks": [2, 2], "pool_size": 2},
    },
]
