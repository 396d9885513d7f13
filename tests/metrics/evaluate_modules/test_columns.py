"""The signature of a declared metric."""

import inspect

import pytest

from hf_captionrl.metrics.evaluate_modules.metric import forwards


def test_forwarded_options_are_in_the_signature():
    def function(captions, model, *, scale=2.0, scorer="", ranks=None):
        return {"scale": scale, "scorer": scorer}

    @forwards(function, "ranks")
    def compute(predictions, *, scorer="mine", **options):
        return function(predictions, None, scorer=scorer, **options)

    assert str(inspect.signature(compute)) == "(predictions, *, scorer='mine', scale=2.0)"
    assert compute(["a"], scale=3.0) == {"scale": 3.0, "scorer": "mine"}
    with pytest.raises(TypeError, match="'bags'"):
        compute(["a"], bags=[])
