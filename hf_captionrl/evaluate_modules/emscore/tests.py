"""Cases of the metric: arguments of `compute`, and numbers that the result must hold."""

test_cases = [
    {
        "predictions": ["a dog runs"],
        "references": [[[1.0, 0.0], [0.0, 1.0]]],
        "token_features": [[[1.0, 0.0], [0.6, 0.8]]],
        "result": {
            "precision": 0.9449747459,
            "recall": 0.9449747459,
            "f": 0.9449747459,
            "fine_precision": 0.8999999964,
            "coarse": 0.9899494953,
        },
    },
    {
        "predictions": ["a dog runs"],
        "references": [[[1.0, 0.0], [0.0, 1.0]]],
        "token_features": [[[1.0, 0.0], [0.6, 0.8]]],
        "idf": [[3.0, 1.0]],
        "result": {
            "precision": 0.9699747468,
            "recall": 0.9449747459,
            "f": 0.9571369085,
            "fine_precision": 0.9499999982,
            "coarse": 0.9899494953,
        },
    },
]
