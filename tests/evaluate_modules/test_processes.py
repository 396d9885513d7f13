"""One result from two processes, and two experiments at once in one folder."""

import json

import pytest

import hf_captionrl.metrics as metrics
from hf_captionrl.metrics.evaluate_modules import MODULES
from tests.evaluate_modules.test_install import job
from tests.evaluate_modules.test_spaces import two_rows
from tests.tolerances import close

CAPTIONS = [["a dog", "a cat"], ["two dogs", "a red dog"], ["a pig", "a pig"], ["one", "two"], ["x y", "x z"]]
CODE = """
import json
import hf_captionrl.metrics.evaluate_modules as modules
modules.install()
import evaluate
options = dict(num_process=2, process_id={process}, experiment_id="{experiment}", cache_dir={cache!r})
shift = {shift}
metric = evaluate.load("caption_diversity", **options)
captions = {captions!r}[shift:]
metric.add_batch(predictions=captions[{process}::2])
diversity = metric.compute()
metric = evaluate.load("self_retrieval", **options)
pool = dict(a=[1.0, 0.0], b=[0.0, 1.0], c=[0.6, 0.8])
if {process} == 0:
    metric.add(prediction="first", reference="b")
    metric.add(prediction="second", reference="a")
    found = metric.compute(image_features=pool, text_features=[[0.0, 1.0], [0.6, 0.8], [0.6, 0.8]], num_bootstrap=0)
else:
    found = metric.compute(predictions=["third"], references=["c"])
print("RESULT", json.dumps([diversity, found]))
"""


@pytest.mark.slow  # four processes, one after the other
def test_two_processes_and_two_experiments(warm_process, tmp_path):
    cache = str(tmp_path / "cache")
    jobs = [
        job(
            tmp_path,
            CODE.format(process=process, experiment=f"run{shift}", cache=cache, shift=shift, captions=CAPTIONS),
            f"{shift}-{process}",
            HF_EVALUATE_OFFLINE="1",
        )
        for shift in (0, 1)
        for process in (0, 1)
    ]
    found = warm_process.run(*jobs)
    for (status, said), (shift, process) in zip(found, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        assert status == 0, said
        diversity, retrieval = json.loads(said.split("RESULT ")[1])
        if process == 1:
            assert (diversity, retrieval) == (None, None), "only the first process has the result"
            continue
        # Rows are in the order of the processes.
        captions = CAPTIONS[shift:]
        expected = metrics.caption_diversity(captions[0::2] + captions[1::2])
        for key in ("div_1", "div_2", "mbleu_4", "unique_captions", "length"):
            assert diversity[key] == close(expected[key]), key
        assert diversity["per_image"]["div_1"] == expected["per_image"]["div_1"].tolist()
        # Captions of both, each with its id: the first retrieves b, the second c before a, the third c.
        assert retrieval["ranks"] == [1, 3, 1]
        assert retrieval["pool_size"] == 3
    # Each experiment has different numbers, so mixing them would be detected.
    assert metrics.caption_diversity(CAPTIONS)["div_1"] != metrics.caption_diversity(CAPTIONS[1:])["div_1"]


EVERY = """
import json
import hf_captionrl.metrics.evaluate_modules as modules
modules.install()
import evaluate
found = {{}}
for name, case in json.loads({cases!r}).items():
    columns = {{key: case.pop(key) for key in ("predictions", "references") if key in case}}
    metric = evaluate.load(name, num_process=2, process_id={process}, experiment_id=name, cache_dir={cache!r})
    half = slice(0, 1) if {process} == 0 else slice(1, None)
    metric.add_batch(**{{key: rows[half] for key, rows in columns.items()}})
    found[name] = metric.compute(**case)
print("RESULT", json.dumps(found))
"""


def test_two_processes_equal_one_for_every_module(warm_process, tmp_path, evaluate):
    cases = {name: two_rows(name) for name in sorted(MODULES)}
    jobs = [
        job(
            tmp_path,
            EVERY.format(cases=json.dumps(cases), process=process, cache=str(tmp_path / "cache")),
            f"every-{process}",
            HF_EVALUATE_OFFLINE="1",
        )
        for process in (0, 1)
    ]
    (first, said), (second, said_second) = warm_process.run(*jobs)
    assert (first, second) == (0, 0), said + said_second
    found = json.loads(said.split("RESULT ")[1])
    assert set(json.loads(said_second.split("RESULT ")[1]).values()) == {None}
    for name, case in cases.items():
        alone = json.loads(json.dumps(evaluate.load(name).compute(**case)))
        assert found[name] == alone, name
        half = {key: rows[:1] if isinstance(rows, list) else rows for key, rows in case.items()}
        if name not in ("self_retrieval", "caption_diversity"):  # half of the processes have other arguments
            assert evaluate.load(name).compute(**half) != alone, "the second process counts"
