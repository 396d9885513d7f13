"""Cases of the metric: arguments of `compute`, and numbers that the result must hold."""

test_cases = [
    {
        "predictions": ["a man rides a horse", "two dogs play"],
        "references": [["a man rides a brown horse", "a rider"], ["two dogs play in the snow"]],
        "result": {
            "bleu_1": 0.6065306596,
            "bleu_4": 0.4534874412,
            "rouge_l": 0.7616470659,
            "cider": 4.2534252562,
            "cider_d": 3.7742235942,
        },
    },
    {
        "predictions": ["a man rides a horse", "two dogs play"],
        "references": [["a man rides a horse"], ["two cats sleep"]],
        "which": ["cider_d", "cider"],
        "result": {"cider": 5.4166666667, "cider_d": 5.4166666667},
    },
]
