"""The rule that no test has a tolerance of its own, on planted faults."""

import pytest

from scripts.source_checks.tolerances import check_tolerances
from tests.planted_faults import messages, plant


@pytest.mark.parametrize(
    "code",
    [
        "torch.testing.assert_close(a, b, rtol=0, atol=1e-5)",
        "torch.testing.assert_close(a, b, rtol=0, atol=tolerance)",
        "np.testing.assert_allclose(a, b, atol=1e-9)",
        "np.testing.assert_allclose(a, b, 0, 1e-9)",
        "assert np.allclose(a, b, 0, 1e-9)",
        "assert a.allclose(b, 0, 1e-9)",
        "assert torch.isclose(a, b, 0, 1e-9)",
        "assert math.isclose(a, b, abs_tol=1e-9)",
        "assert a == pytest.approx(b, abs=1e-6)",
        "assert a == pytest.approx(b, rel=1e-3, abs=2)",
        "assert a == approx(b, None, 1e-6)",
        "np.testing.assert_almost_equal(a, b)",
        "self.assertAlmostEqual(a, b, delta=1e-3)",
        "same(a, b, **{'atol': 1e-5})",
        "def same(a, b, atol=1e-5): ...",
        "def same(a, b, *, atol): ...",
        "assert abs(a - b) < 1e-6",
        "assert abs(a - b) < 5e-4",
        "assert (a - b).abs().max() <= 0.01",
        "assert 1e-6 > abs(a - b)",
        "assert 0 <= a <= 1e-9",
        "assert a >= -1e-6",
        "assert a <= b + 1e-9",
        "assert a < 1e-6 + 1e-9 * size",
        "OFF = 1e-6\nassert abs(a - b) < OFF",
        "off = 1e-6 * size\nassert abs(a - b) < off",
    ],
)
def test_bare_tolerances_are_faults(tmp_path, code):
    faults = check_tolerances(plant(tmp_path, {"tests/losses/test_a.py": f"x = 1\n{code}\n"}))
    assert faults
    assert {fault.path for fault in faults} == {"tests/losses/test_a.py"}
    assert {fault.line for fault in faults} == {1 + len(code.splitlines())}
    assert all("tests/tolerances.py" in message for message in messages(faults))


@pytest.mark.parametrize(
    "code",
    [
        "assert_close(a, b)",
        "assert_close(a, b, ulps=64, summands=1000, magnitude=1.0)",
        "assert a == close(b, dtype='float32')",
        "assert a == within(b, 0.01)",
        "assert abs(a - b) < resolution(1.0)",
        "torch.testing.assert_close(a, b, rtol=0, atol=0)",
        "torch.testing.assert_close(a, b)",
        "assert a == pytest.approx(b)",
        "assert a == pytest.approx(b, rel=1e-3)",
        "assert np.allclose(a, b)",
        "assert p_value < 0.001",
        "assert abs(a - b) > 1e-6",
        "assert abs(a - b) < 0.1 < 1e-2 + abs(c)",
        "config(learning_rate=1e-5)",
        "assert learning_rate == 1e-5",
        "abs(1e-6)",
    ],
)
def test_what_knows_the_magnitude_passes(tmp_path, code):
    assert check_tolerances(plant(tmp_path, {"tests/test_a.py": code})) == []


def test_only_the_tests_are_read_and_the_helper_may(tmp_path):
    code = "pytest.approx(1, abs=1e-9)"
    assert check_tolerances(plant(tmp_path, {"tests/tolerances.py": code, "scripts/a.py": code})) == []
