"""Kept answers: nothing is asked twice, also after a kill; a limit on requests; damaged files."""

import json
import math
from collections import Counter

import pytest

from hf_captionrl.captioners.language_model_clients import HTTPBackend
from hf_captionrl.utils.prompts import (
    BackendError,
    Failure,
    KeptAnswers,
    Prompt,
    Truncated,
    image_labels,
)
from tests.apps.boosting.server import ChatServer, texts_of
from tests.processes import Forked


class Counting:
    """Answers with the length of the question, and counts questions; some fail."""

    model, is_multimodal = "counting", False

    def __init__(self, revision="1"):
        self.revision, self.asked = revision, []

    def _each(self, prompts, answer):
        for position, prompt in enumerate(prompts):
            self.asked.append(prompt.user)
            kind = {"down": "backend_failed", "no": "backend_rejected"}.get(prompt.user)
            yield position, Failure(kind, "told to") if kind else answer(prompt)

    def complete(self, prompts):
        return self._each(prompts, lambda p: Truncated("cut") if p.user == "long" else f"{len(p.user)} \u2028")

    def score_answers(self, prompts, answers):
        return self._each(prompts, lambda p: [-float(len(p.user) + len(answer)) for answer in answers])


def prompts_of(*texts, **more):
    return [Prompt("stage", "", text, **more) for text in texts]


def test_answers_scores_and_rejections_are_kept_and_failures_asked_again(tmp_path):
    texts = ("a", "long", "no", "down", "a")
    for run in range(3):
        backend = Counting()
        with KeptAnswers(backend, tmp_path / "new/kept.jsonl") as kept:
            found = dict(kept.complete(prompts_of(*texts)))
            scores = [row for _, row in kept.score_answers(prompts_of("a", "bb"), ["x", "yy"])]
        assert found[0] == found[4] == "1 \u2028"
        assert (found[1], found[2]) == (Truncated("cut"), Failure("backend_rejected", "told to"))
        assert found[3].reason == "backend_failed"
        assert scores == [[-2, -3], [-3, -4]]
        assert backend.asked == (["a", "long", "no", "down", "a", "bb"] if run == 0 else ["down"])
        assert kept.num_requests == len(backend.asked)


@pytest.mark.parametrize("change", ["text", "attempt", "revision", "answers", "image"])
def test_other_questions_and_backends_are_asked(tmp_path, change):
    def ask(revision="1", answers=("x",), **prompt):
        backend = Counting(revision)
        with KeptAnswers(backend, tmp_path / "kept.jsonl") as kept:
            list(kept.score_answers([Prompt(**{"stage": "s", "image_id": "i", "user": "a", **prompt})], answers))
        return len(backend.asked)

    assert (ask(), ask()) == (1, 0)
    other = {"text": {"user": "b"}, "attempt": {"attempt": 1}, "revision": {"revision": "2"}}
    assert ask(**other.get(change, {"answers": ("y",)} if change == "answers" else {"image_id": "j"})) == 1


def test_limit_stops_with_the_answers_kept(tmp_path):
    texts = [f"question {number}" for number in range(7)]
    with KeptAnswers(Counting(), tmp_path / "kept.jsonl", max_requests=3) as kept:
        for _ in range(2):
            found = []
            with pytest.raises(BackendError, match="max_requests"):
                found.extend(kept.complete(prompts_of(*texts)))
            assert len(found) == 3
        assert kept.backend.asked == texts[:3]
    with KeptAnswers(Counting(), tmp_path / "kept.jsonl", max_requests=4) as kept:
        assert len(dict(kept.complete(prompts_of(*texts)))) == 7


def ask_all(url, path):
    with KeptAnswers(HTTPBackend(url, "m", concurrency=1), path) as kept:
        found = dict(kept.complete(prompts_of(*(f"question {number}" for number in range(12)))))
    return 0 if len(found) == 12 else 1


def test_killed_process_asks_nothing_twice(tmp_path):
    path = tmp_path / "kept.jsonl"
    said = lambda messages: f"answer to {texts_of(messages)[0]}"  # noqa: E731
    with ChatServer(said, lambda number, messages: "hang" if number == 5 else "ok") as server:
        with Forked(ask_all, server.url, path) as process:
            assert server.wait_for(6)
            process.kill()
            assert process.wait() == -9
        with path.open("ab") as file:
            file.write(b'{"key": "cut in the midd')
        with Forked(ask_all, server.url, path) as process:
            assert process.wait() == 0
        asked = Counter(texts_of(request["messages"])[0] for request in server.requests)
    # Only the question whose answer had not arrived.
    assert asked == Counter({f"question {number}": 1 for number in range(12)}) + Counter(["question 5"])
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert sorted(answers) == sorted(f"answer to question {number}" for number in range(12))


@pytest.mark.parametrize(
    "line", ["no JSON", "[" * 100_000, "[]", '{"key": "a"}', '{"key": "a", "answer": 3}', '{"answer": "a"}']
)
def test_damaged_file_is_refused_by_line_and_not_changed(tmp_path, line):
    path = tmp_path / "kept.jsonl"
    path.write_text('{"key": "k", "answer": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        KeptAnswers(Counting(), path)
    assert path.read_text().endswith(line + "\n")


def test_second_process_is_refused(tmp_path):
    with KeptAnswers(Counting(), tmp_path / "kept.jsonl"), pytest.raises(ValueError, match=r"kept\.jsonl"):
        KeptAnswers(Counting(), tmp_path / "kept.jsonl")


def test_letters_of_images_end_with_the_alphabet():
    assert image_labels(26)[-1] == "Z"
    with pytest.raises(ValueError, match="27 images"):
        image_labels(27)


HALF = "a \ud83d dog"
UNUSABLE = [
    HALF,
    Truncated(HALF),
    [math.nan, -1.0],
    [-math.inf, -math.inf],
    [math.inf, 0.0],
]


@pytest.mark.parametrize("answer", UNUSABLE, ids=repr)
def test_an_answer_that_cannot_be_used_is_asked_again(tmp_path, answer, capsys):
    """Whether it comes from the backend, or stands in the file."""
    path, good = tmp_path / "kept.jsonl", [-1.0, -math.inf] if isinstance(answer, list) else "a dog"
    answers = ["x", "y"] if isinstance(answer, list) else None

    class Changing(Counting):
        now = answer

        def complete(self, prompts):
            return self._each(prompts, lambda prompt: self.now)

        def score_answers(self, prompts, answers):
            return self.complete(prompts)

    def ask():
        with KeptAnswers(backend, path) as kept:
            prompts = prompts_of("a")
            return dict(kept.complete(prompts) if answers is None else kept.score_answers(prompts, answers))[0]

    backend = Changing()
    assert ask().reason == ask().reason == "backend_failed"
    assert not path.exists()
    backend.now = good
    assert ask() == ask() == good
    assert len(backend.asked) == 3
    # As an earlier version wrote it, or a person.
    entry = json.loads(path.read_text())
    stored = {"truncated": answer.text} if isinstance(answer, Truncated) else answer
    path.write_text(json.dumps(entry | {"answer": stored}) + "\n")
    capsys.readouterr()
    assert ask() == good
    assert len(backend.asked) == 4
    assert f"{path}, line 1" in capsys.readouterr().err
