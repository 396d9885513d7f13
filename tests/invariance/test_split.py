"""However eight images are split into processes and micro-batches, rewards and gradient are the same.

`1 x 8` is one process of eight images, `2 x 4` two processes of four, and so on down to eight of one.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.invariance.one_step import IMAGES, KINDS, place, steps
from tests.processes import run_in_processes
from tests.tolerances import assert_close

TRAINERS = KINDS[:3]
ACCUMULATIONS = {1: (1, 2, 4), 2: (1, 2, 4), 4: (1, 2), 8: (1,)}
"""By the number of processes, as far as eight images go."""
SPLITS = [
    pytest.param(processes, accumulation, marks=[pytest.mark.slow] if processes > 2 else [])
    for processes, accumulations in ACCUMULATIONS.items()
    for accumulation in accumulations
]
# Of the largest entry of a parameter's gradient. It is a sum over some 1e5 numbers in fp32 (6e-8 a rounding), added up in
# another order; 4.6e-6 was seen. An SR advantage is a difference of two rewards, which are off themselves; 2.3e-5 was seen.
GRADIENT = {"smile": 2e-5, "sle": 2e-5, "sr": 1e-4}
# CIDEr-D and BLEU are counts and fp64. A cosine in fp32 depends on how many captions are encoded at a time, and is
# multiplied by the scorer's scale, some 25; 4.8e-6 was seen.
REWARD = {"sle": {"magnitude": 1}, "sr": {"dtype": "float32", "magnitude": 25}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("invariance")


@pytest.fixture(scope="module")
def found(folder):
    """What a step of a trainer finds, by processes and accumulation; all of a number of processes in one session."""
    done: set[int] = set()

    def get(kind: str, processes: int, accumulation: int) -> dict:
        if processes not in done:
            cuts = [(k, a) for k in TRAINERS for a in ACCUMULATIONS[processes]]
            cuts += [(KINDS[-1], 1)] if processes == 2 else []
            if processes == 1:
                steps(str(folder), cuts, 1)
            else:
                run_in_processes(processes, steps, str(folder), cuts, processes, folder=folder)
            done.add(processes)
        where = place(folder, kind, processes, accumulation)
        ranks = [json.loads((where / f"{rank}.json").read_text()) for rank in range(processes)]
        whole = {name: {k: v for rank in ranks for k, v in rank[name].items()} for name in ("rewards", "advantages")}
        return {**whole, "ranks": ranks, "gradients": load_file(where / "gradients.safetensors")}

    return get


@pytest.mark.parametrize(("processes", "accumulation"), SPLITS)
@pytest.mark.parametrize("kind", TRAINERS)
def test_rewards_and_gradients_are_those_of_the_whole_batch(found, kind, processes, accumulation):
    whole, split = found(kind, 1, 1), found(kind, processes, accumulation)
    size = IMAGES // processes // accumulation
    assert [rank["micro_batches"] for rank in split["ranks"]] == [[size] * accumulation] * processes
    assert [rank["processes"] for rank in split["ranks"]] == [processes] * processes
    if kind == "smile":
        assert sum(rank["tokens"] for rank in split["ranks"]) == whole["ranks"][0]["tokens"]
    else:
        assert sorted(split["rewards"]) == sorted(map(str, range(IMAGES)))
        for row, rewards in whole["rewards"].items():
            for name, ours in (("rewards", rewards), ("advantages", whole["advantages"][row])):
                theirs = torch.tensor(split[name][row], dtype=torch.float64)
                expected = torch.tensor(ours, dtype=torch.float64)
                assert_close(theirs, expected, **REWARD[kind], msg=name)
            assert len({str(value) for value in rewards}) > 1  # of one image, too, captions earn differently
    assert whole["gradients"].keys() == split["gradients"].keys()
    assert max(gradient.abs().max() for gradient in whole["gradients"].values()) > 1e-2
    for name, gradient in whole["gradients"].items():
        largest = max(float(gradient.abs().max()), 1e-3)
        off = float((split["gradients"][name] - gradient).abs().max())
        assert off <= GRADIENT[kind] * largest, name


def test_rewards_of_a_part_of_the_batch_would_be_found(found):
    """The control: candidates of one process only, as without a gather, are other rewards and another gradient."""
    whole, split = found("sr", 1, 1), found(KINDS[-1], 2, 1)
    off = max(
        abs(a - b)
        for row, rewards in whole["rewards"].items()
        for [a], [b] in zip(rewards, split["rewards"][row], strict=True)
    )
    assert off > 0.05
    assert any(
        float((split["gradients"][name] - gradient).abs().max()) > 0.01 * float(gradient.abs().max())
        for name, gradient in whole["gradients"].items()
    )


def test_a_worker_that_fails_is_reported(tmp_path):
    with pytest.raises(AssertionError, match="no such trainer"):
        run_in_processes(2, _fail, folder=tmp_path)


def _fail() -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("no such trainer")
