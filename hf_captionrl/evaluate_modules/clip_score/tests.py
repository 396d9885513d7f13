"""Cases of the metric: arguments of `compute`, and numbers that the result must hold."""

test_cases = [
    {
        "predictions": ["a kite", "a dog"],
        "references": [[0.6, 0.8], [0.0, 1.0]],
        "text_features": [[1.0, 0.0], [0.0, 1.0]],
        "preset": "hessel",
        "result": {"clip_score": 2.0000000119},
    },
    {
        "predictions": ["a kite"],
        "references": [[0.6, 0.8]],
        "text_features": [[1.0, 0.0]],
        "reference_features": [[[0.8, 0.6], [0.0, 1.0]]],
        "preset": "hessel",
        "result": {"clip_score": 1.5000000238, "ref_clip_score": 1.0434782606},
    },
]
