"""Cases of the metric: arguments of `compute`, and numbers that the result must hold."""

test_cases = [
    {
        "predictions": [["a man rides a horse", "a man rides a horse"]],
        "result": {
            "div_1": 0.4,
            "div_2": 0.4,
            "mbleu_4": 0.9999999995,
            "unique_captions": 0.5,
            "length": 5.0,
            "vocabulary_size": 0,
        },
    },
    {
        "predictions": ["a cat", "two dogs", "one cat sleeps", "a dog"],
        "image_ids": ["c", "d", "c", "d"],
        "training_captions": ["a cat"],
        "min_frequency": 2,
        "result": {
            "div_1": 0.9,
            "div_2": 0.55,
            "mbleu_4": 4.14e-08,
            "unique_captions": 1.0,
            "length": 2.25,
            "vocabulary_size": 2,
            "novel_captions": 0.75,
        },
    },
]
