"""Whether computed numbers are close: tolerances in units of their resolution, not in absolute numbers.

A sum in floating point is exact up to its resolution: `eps(dtype)` times the magnitude of what was added up. An absolute
tolerance such as 1e-5 is generous for probabilities in fp32 and below one unit in the last place for rewards of 100 nats,
where it passes on one processor and fails on another. So tests compare with

    tolerance = ulps * eps(dtype) * magnitude * sqrt(summands)

    assert_close(found, expected)                     # tensors, arrays, numbers, sequences or dicts of them
    assert number == close(expected, dtype="float32")  # numbers that came through fp32
    assert difference < resolution(magnitude)          # where only the difference is known
    assert share == within(expected, 0.03)             # no rounding: statistics, pixels, rounded figures of a paper
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

ULPS = 16
"""Units in the last place that are allowed by default: 1.9e-6 of the magnitude in fp32, 3.6e-15 in fp64."""
_ROUNDING = 8
"""An absolute tolerance below so many units in the last place tells processors apart, not right from wrong."""


def resolution(magnitude, *, ulps=ULPS, summands=1, dtype="float32"):
    """The tolerance of numbers of this magnitude, which are sums of so many terms."""
    if not 0 <= magnitude < math.inf:
        raise ValueError(f"magnitude is {magnitude}. Use the largest absolute value that was added up.")
    if ulps < 1 or summands < 1:
        raise ValueError(f"ulps is {ulps} and summands {summands}. Use 1 or more.")
    return ulps * torch.finfo(_floating(dtype)).eps * magnitude * math.sqrt(summands)


def close(expected, *, ulps=ULPS, summands=1, magnitude=None, dtype="float64"):
    """What equals numbers, sequences and dicts of numbers that are close to `expected`.

    `dtype` is the coarsest one that the numbers came through, `magnitude` of what was added up, where the sum is smaller.
    """
    tolerance = resolution(_magnitude(expected, magnitude), ulps=ulps, summands=summands, dtype=dtype)
    return pytest.approx(expected, rel=0, abs=tolerance)


def within(expected, tolerance, *, dtype="float32"):
    """What equals numbers that differ from `expected` by less than an absolute tolerance that is not one of rounding."""
    least = resolution(_magnitude(expected, None), ulps=_ROUNDING, dtype=dtype)
    if not least < tolerance < math.inf:
        raise ValueError(
            f"tolerance ({tolerance}) must be above {least:.2g}, {_ROUNDING} units in the last place of the largest "
            f"expected value in {dtype}. Use close(expected, dtype=...), which counts in such units."
        )
    return pytest.approx(expected, rel=0, abs=tolerance)


def assert_close(
    found, expected, *, ulps=ULPS, summands=1, magnitude=None, dtype=None, check_dtype=True, equal_nan=False, msg=""
):
    """Assert that two tensors are equal but for rounding; shapes and, of two tensors, dtypes are equal too.

    `expected` may be one number for all. `dtype` defaults to the coarser one of the two, `magnitude` to the largest
    absolute value expected. Infinities equal themselves; NaN equals NaN with `equal_nan` only.
    """
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), f"{msg}: {sorted(found)} instead of {sorted(expected)}"
        pairs = [(name, found[name], expected[name]) for name in expected]
    elif isinstance(expected, Sequence) and any(isinstance(value, torch.Tensor) for value in expected):
        assert len(found) == len(expected), f"{msg}: {len(found)} instead of {len(expected)}"
        pairs = [(n, *pair) for n, pair in enumerate(zip(found, expected, strict=True))]
    else:
        pairs = [("", found, expected)]
    for name, one, other in pairs:
        label = ", ".join(filter(None, (str(msg), str(name))))
        _assert_one(one, other, ulps, summands, magnitude, dtype, check_dtype, equal_nan, label)


def _assert_one(found, expected, ulps, summands, magnitude, dtype, check_dtype, equal_nan, msg):
    if check_dtype and isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, f"{msg}: {found.dtype} instead of {expected.dtype}"
    dtype = dtype or _coarser(found, expected)
    one, other = _double(found), _double(expected)
    if other.dim() == 0:
        other = other.expand_as(one)
    assert one.shape == other.shape, f"{msg}: shape {tuple(one.shape)} instead of {tuple(other.shape)}"
    tolerance = resolution(_magnitude(other, magnitude), ulps=ulps, summands=summands, dtype=dtype)
    torch.testing.assert_close(
        one,
        other,
        rtol=0,
        atol=tolerance,
        equal_nan=equal_nan,
        msg=lambda text: f"{msg}\n{text}\n{tolerance:.3g} allowed: {ulps} units in the last place of {dtype}",
    )


def _double(values):
    """Anything of numbers as a tensor in fp64."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().double()
    return torch.as_tensor(np.asarray(values, dtype=np.float64))


def _magnitude(expected, given):
    """The largest finite absolute value of what is expected, or of what was added up, where that is larger."""
    values = list(expected.values()) if isinstance(expected, Mapping) else expected
    values = _double(values)
    values = values[values.isfinite()].abs()
    return max(float(values.max()) if values.numel() else 0.0, given or 0.0)


def _floating(dtype):
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}. Use a floating-point type such as 'float32'.")
    return found


def _coarser(*values):
    """The floating-point type of lowest resolution among tensors and arrays; fp64 where there are none."""
    dtypes = [str(value.dtype) for value in values if isinstance(value, torch.Tensor | np.ndarray | np.generic)]
    floating = [_floating(name) for name in dtypes if "float" in name] or [torch.float64]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps)
