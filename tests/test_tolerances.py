"""The helper that every test compares floating-point numbers with."""

import math

import numpy as np
import pytest
import torch

from hf_captionrl.rewards import retrieval_rewards
from tests.tolerances import assert_close, close, resolution, within

DTYPES = ("float64", "float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 100.0])
def test_tolerance_is_units_in_the_last_place(dtype, magnitude):
    expected = torch.tensor([magnitude, 0.0], dtype=getattr(torch, dtype))
    unit = torch.finfo(expected.dtype).eps * float(expected[0])
    for found in (expected.double() + 15 * unit, expected.double() - 15 * unit):
        assert_close(found, expected, check_dtype=False)
        assert found.tolist() == close(expected.tolist(), dtype=dtype)
    too_far = expected.double() + torch.tensor([0.0, 17 * unit])
    with pytest.raises(AssertionError, match=f"16 units in the last place of torch.{dtype}"):
        assert_close(too_far, expected, check_dtype=False)
    assert too_far.tolist() != close(expected.tolist(), dtype=dtype)
    assert_close(too_far, expected, check_dtype=False, ulps=18)


def test_the_coarser_dtype_decides():
    expected = torch.tensor([3.0], dtype=torch.float64)
    found = torch.tensor([3.0 * (1 + 1e-6)])
    assert_close(found, expected, check_dtype=False)
    assert_close(expected, found, check_dtype=False)
    assert_close(found.numpy(), expected.numpy())
    assert_close(found.double(), expected, dtype="float32")
    assert_close(found.double(), expected, dtype=torch.float32)
    with pytest.raises(AssertionError, match="units in the last place"):
        assert_close(found.double(), expected)
    with pytest.raises(AssertionError, match="float32 instead of"):
        assert_close(found, expected)


def test_long_sums_may_be_off_by_the_root_of_their_length():
    terms = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    one_by_one = np.cumsum(terms.numpy(), dtype=np.float32)[-1]
    exact = terms.double().sum()
    off = abs(float(one_by_one) - float(exact)) / float(exact)
    assert off > resolution(1)  # so the default does not do
    with pytest.raises(AssertionError):
        assert_close(one_by_one, float(exact))
    assert_close(one_by_one, float(exact), summands=len(terms))
    assert resolution(2.0, summands=100) == pytest.approx(10 * resolution(2.0))


def test_cancellation_needs_the_magnitude_of_what_was_added_up():
    difference = torch.tensor(100.0 + 1e-4) - torch.tensor(100.0)
    assert_close(difference, 1e-4, magnitude=100)
    with pytest.raises(AssertionError):
        assert_close(difference, 1e-4)
    assert float(difference) == close(1e-4, magnitude=100, dtype="float32")
    # It is a floor: larger values have a coarser resolution.
    assert_close(torch.tensor(1000.0), 1000.001, magnitude=1)


def test_rewards_of_another_order_of_summation_are_close():
    """What failed on another processor: rewards of 37 nats that differ in the last place, by more than 1e-5."""
    similarity = torch.tensor([[0.1, 0.47, 0.2]])
    reward = retrieval_rewards(similarity, torch.tensor([0]), "log_prob", 100.0)
    other = torch.nextafter(torch.nextafter(torch.nextafter(reward, torch.zeros(1)), torch.zeros(1)), torch.zeros(1))
    assert float((other - reward).abs()) > 1e-5
    assert_close(other, reward)
    with pytest.raises(AssertionError):
        assert_close(reward + 0.001, reward)


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (torch.zeros(2), torch.zeros(3), r"shape \(2,\) instead of \(3,\)"),
        (torch.zeros(1, 2), torch.zeros(2), "shape"),
        (torch.tensor([1e-9]), torch.tensor([0.0]), "units in the last place"),
        (torch.tensor([math.nan]), torch.tensor([1.0]), "units in the last place"),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), "units in the last place"),
        (torch.tensor([math.inf]), torch.tensor([1e30]), "units in the last place"),
        (torch.tensor([1e30]), torch.tensor([math.inf]), "units in the last place"),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.1, math.inf]), "units in the last place"),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, "instead of"),
        ({"a": torch.ones(1), "b": torch.zeros(1)}, {"a": torch.ones(1), "b": torch.ones(1)}, "gradients, b"),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)], "1 instead of 2"),
        ([torch.ones(1), torch.zeros(1)], [torch.ones(1), torch.ones(1)], "gradients, 1"),
        ([1.0, 2.0], [1.0, 2.1], "units in the last place"),
        (2.0, 2.1, "units in the last place"),
    ],
)
def test_different_values_fail(found, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(found, expected, msg="gradients")


def test_equal_values_pass():
    nan = torch.tensor([1.0, math.nan])
    assert_close(nan, nan.clone(), equal_nan=True)
    assert_close(torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 1.0]))
    assert_close(torch.ones(2, 3), 1.0)
    assert_close(torch.ones(3, requires_grad=True), np.ones(3))
    assert_close({"a": torch.ones(1)}, {"a": torch.ones(1)})
    assert_close((torch.ones(1), torch.ones(2)), [torch.ones(1), torch.ones(2)])
    assert_close(torch.zeros(0), torch.zeros(0))
    assert_close([], [])
    assert close({"loss": 0.5}) == {"loss": 0.5}


def test_within_refuses_tolerances_of_rounding():
    assert within(0.5, 0.03) == 0.52
    assert within(0.5, 0.03) != 0.54
    assert within({"a": 1.05}, 0.1) == {"a": 1.0}
    with pytest.raises(ValueError, match=r"tolerance \(1e-05\) must be above 3.5e-05"):
        within([1.0, -37.0], 1e-5)
    within([1.0, -37.0], 1e-5, dtype="float64")
    with pytest.raises(ValueError, match="must be above"):
        within(1.0, 0.0)
    with pytest.raises(ValueError, match="must be above"):
        within(1.0, math.nan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ulps": 0}, "ulps is 0"),
        ({"summands": 0}, "summands 0"),
        ({"dtype": "int64"}, "dtype is 'int64'"),
        ({"dtype": "float31"}, "dtype is 'float31'"),
        ({"magnitude": math.inf}, "magnitude is inf"),
        ({"magnitude": -1.0}, "magnitude is -1.0"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        resolution(**{"magnitude": 1.0, **change})
