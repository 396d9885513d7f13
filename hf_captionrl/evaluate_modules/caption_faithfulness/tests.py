"""Cases of the metric: arguments of `compute`, and numbers that the result must hold."""

test_cases = [
    {
        "predictions": ["a puppy chases a ball", "two cats"],
        "references": [["dog"], ["cat"]],
        "synonyms": {"dog": ["puppy"], "ball": []},
        "result": {"chair_i": 0.3333333333, "chair_s": 0.5, "object_recall": 1.0},
    },
    {
        "predictions": ["two large pigs on a blue background"],
        "references": [
            {
                "kind": "pig",
                "count": 2,
                "size": "small",
                "orientation": "sideways",
                "position": "top",
                "background": "blue",
                "second": "mushroom",
                "relation": "left of",
            }
        ],
        "result": {"hallucination": 0.25, "fact_recall": 0.375, "wrong_captions": 1.0},
    },
]
