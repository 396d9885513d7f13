"""Benchmarks of human ratings in the layout of their authors, and `captionrl agreement`."""

import csv
import json
import sys
import typing

import evaluate
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.io import savemat
from scipy.stats import kendalltau

from hf_captionrl.cli import main
from hf_captionrl.cli.agreement import AgreementOptions
from hf_captionrl.data import open_image
from hf_captionrl.evaluation.metric_functions import SCORER_METRICS, TEXT_METRICS, metric_function, program_metric
from hf_captionrl.experimental.ratings import load_ratings, published_agreement
from hf_captionrl.metrics import bleu
from hf_captionrl.scenes import load_scenes
from tests.apps.boosting.server import ChatServer, texts_of

IMAGES = 8
PROGRAM = "import json, sys\nfor line in sys.stdin:\n    print(len(json.loads(line)['candidate']))\n"


@pytest.fixture(scope="module")
def scenes():
    return load_scenes(num_train=0, num_validation=0)["test"].select(range(IMAGES))


@pytest.fixture
def folder(tmp_path, scenes):
    """Ratings of every first caption for every image, in the files of Flickr8k_text, and the images."""
    (tmp_path / "images").mkdir()
    generator = np.random.default_rng(0)
    tokens, expert, crowd = [], [], []
    for i, row in enumerate(scenes):
        open_image(row["image"]).save(tmp_path / "images" / f"{i}.jpg")
        tokens += [f"{i}.jpg#{n}\t{text}\n" for n, text in enumerate(row["captions"])]
        for j in range(IMAGES):
            rating = 3 if i == j else 1
            expert.append(f"{i}.jpg\t{j}.jpg#0\t1\t{rating}\t{rating + int(generator.integers(2))}\n")
            yes = 3 if i == j else int(generator.integers(3))
            crowd.append(f"{i}.jpg\t{j}.jpg#0\t{yes / 3}\t{yes}\t{3 - yes}\n")
    (tmp_path / "Flickr8k.token.txt").write_text("".join(tokens))
    (tmp_path / "ExpertAnnotations.txt").write_text("".join(expert))
    (tmp_path / "CrowdFlowerAnnotations.txt").write_text("".join(crowd))
    return tmp_path


def test_protocols(folder, scenes):
    expert, crowd = (load_ratings(name, folder) for name in ("flickr8k-expert", "flickr8k-cf"))
    assert len(expert.candidates) < IMAGES**2  # an image's own captions are left out
    assert not any(c in r for c, r in zip(expert.candidates, expert.references, strict=True))
    assert expert.ratings.shape == (len(expert.candidates), 3)
    assert expert.variant == "c"
    assert len(crowd.candidates) == IMAGES**2
    assert not any(c in r for c, r in zip(crowd.candidates, crowd.references, strict=True))
    assert (crowd.ratings[:: IMAGES + 1] == 1).all()
    assert crowd.variant == "b"
    own = crowd.references[0]
    assert own == [text.strip() for text in scenes[0]["captions"] if text.strip() != scenes[0]["captions"][0].strip()]
    # A rated caption of an image is not a reference of the image's other candidates.
    assert crowd.references[:IMAGES] == [own] * IMAGES
    assert expert.references[0] == [text.strip() for text in scenes[0]["captions"]]


def test_captions_of_a_karpathy_split_are_those_of_the_token_file(folder, scenes):
    before = load_ratings("flickr8k-expert", folder)
    (folder / "Flickr8k.token.txt").unlink()
    texts = [[{"raw": text} for text in row["captions"]] for row in scenes]
    images = [{"filename": f"{i}.jpg", "sentences": group} for i, group in enumerate(texts)]
    (folder / "dataset_flickr8k.json").write_text(json.dumps({"images": images}))
    after = load_ratings("flickr8k-expert", folder)
    assert (after.candidates, after.references, after.images) == (before.candidates, before.references, before.images)


def length(candidates, references):
    return [len(text) for text in candidates]


COMPOSITE = {"8k": 3, "30k": 4, "coco": 4}  # captions per line


def write_composite(folder):
    """Ratings as Mechanical Turk exports them: 27 columns of the task, the image, its captions, their ratings."""
    tokens = {"8k": "Flickr8k.token.txt", "30k": "results_20130124.token"}
    coco = []
    for part, count in COMPOSITE.items():
        header = [f"Task{column}" for column in range(27)] + ["Input.image_url"]
        header += [f"Input.text{i}" for i in range(1, count + 1)] + [f"Answer.Q{i}Answer" for i in range(1, count + 1)]
        lines, captions = [], []
        for i in range(4):
            name = f"COCO_val2014_{i:012d}.jpg" if part == "coco" else f"{part}{i}.jpg"
            own = [f"{part} image {i}, caption {n} ." for n in range(5)]
            captions += [f"{name}#{n}\t{text}\n" for n, text in enumerate(own)]
            coco += [{"image_id": i, "id": 5 * i + n, "caption": text} for n, text in enumerate(own) if part == "coco"]
            texts = [own[i].replace(" .", "").upper(), f"a machine; {part} {i}", "a scene.it has grass", "unused"]
            texts = texts[:count]
            rated = [5, 3 - i % 2, 1 + i % 3, 5][:count]
            lines.append([*["x"] * 27, f"http://images/{part}/{name}", *texts, *rated])
        with (folder / f"{part}_correctness.csv").open("w", newline="") as file:
            writer = csv.writer(file, delimiter=";")
            writer.writerows([header, *lines, [""] * len(header), [""] * len(header)])
        if part != "coco":
            (folder / tokens[part]).write_text("".join(captions))
    (folder / "captions_val2014.json").write_text(json.dumps({"images": [], "annotations": coco}))


def test_composite(tmp_path):
    write_composite(tmp_path)
    rated = load_ratings("composite", tmp_path)
    assert (rated.name, rated.variant, rated.num_bad_lines) == ("composite", "c", 0)
    assert len(rated.candidates) == 3 * 4 * 3  # the fourth caption of a line is not used
    assert rated.candidates[:3] == ["8K IMAGE 0, CAPTION 0", "a machine; 8k 0", "a scene.it has grass"]
    assert rated.references[0] == rated.references[2] == [f"8k image 0, caption {n} ." for n in range(1, 5)]
    assert rated.references[-1] == [f"coco image 3, caption {n} ." for n in (0, 1, 2, 4)]
    assert rated.images[-1] == "COCO_val2014_000000000003.jpg"
    expected = [rating for _ in COMPOSITE for i in range(4) for rating in (5, 3 - i % 2, 1 + i % 3)]
    assert rated.ratings.ravel().tolist() == expected


PASCAL = [("HC", 30), ("HI", 47), ("HM", 24), ("MM", 5)]  # votes of 48 for the first caption; 24 is a tie


def write_pascal(folder):
    """Structs of MATLAB: pairs (image, two captions) with their category, and 48 triplets (A, B, C, winner) per pair."""

    def cell(text):
        inner = np.empty((1, 1), dtype=object)
        inner[0, 0] = text
        return inner

    pairs = np.empty((1, 4), dtype=[(name, object) for name in ("image", "first", "second")])
    triplets = np.empty((1, 4 * 48), dtype=[(name, object) for name in ("A", "B", "C", "winner")])
    for i, (_, votes) in enumerate(PASCAL):
        texts = [f"short {i}", f"a longer one {i} "]
        pairs[0, i] = (f"2008_00000{i // 2}.jpg", *texts)
        for j in range(48):
            is_first, swapped = j < votes, j % 2
            order = texts[::-1] if swapped else texts
            winner = 1.0 if is_first != bool(swapped) else -1.0
            triplets[0, 48 * i + j] = (cell(f" reference {i} {j}"), cell(order[0]), cell(order[1]), winner)
    new_data = np.array([[6, 6], [6, 7], [4, 6], [1, 2]])
    savemat(folder / "pair_pascal.mat", {"new_input": pairs, "category": [[1, 2, 3, 4]], "new_data": new_data})
    savemat(folder / "consensus_pascal.mat", {"triplets": triplets})


def test_pascal50s(tmp_path):
    (tmp_path / "pyCIDErConsensus").mkdir()
    write_pascal(tmp_path / "pyCIDErConsensus")
    rated = load_ratings("pascal50s", tmp_path)
    assert len(rated.candidates) == 2 * 4 * 5  # 5 draws of the references
    assert rated.candidates[:4] == ["short 0", "a longer one 0", "short 1", "a longer one 1"]
    assert rated.images[:8] == ["2008_000000.jpg"] * 4 + ["2008_000001.jpg"] * 4
    for row, (references, votes) in enumerate(zip(rated.references, rated.ratings.ravel(), strict=True)):
        pair = row // 2 % 4
        kind, first = PASCAL[pair]
        assert votes == (first if row % 2 == 0 else 48 - first)
        assert rated.categories[row] == kind
        assert len(set(references)) == 5
        assert set(references) <= {f"reference {pair} {j}" for j in range(48)}
        assert references == rated.references[row // 2 * 2]
    draws = [tuple(rated.references[8 * draw]) for draw in range(5)]
    assert len(set(draws)) == 5
    assert load_ratings("pascal50s", tmp_path, seed=1).references != rated.references
    whole = load_ratings("pascal50s", tmp_path, num_references=0)
    assert (whole.name, len(whole.candidates)) == ("pascal50s, 48 references", 8)
    assert sorted(whole.references[7]) == sorted(f"reference 3 {j}" for j in range(48))
    found = rated.agreement({"short": lambda c, r: [-len(text) for text in c], "long": length}, num_bootstrap=20)
    parts = {kind: part["accuracy"] for kind, part in found["metrics"]["short"]["categories"].items()}
    assert parts == {"HC": 1, "HI": 1, "HM": 0.5, "MM": 0}  # a tie counts one half
    assert found["metrics"]["short"]["accuracy"] == 1 - found["metrics"]["long"]["accuracy"] == 0.625


def write_foil(folder):
    captions, images, annotations = [], [], []
    for i in range(6):
        images.append({"id": i, "file_name": f"COCO_val2014_{i:012d}.jpg"})
        texts = [f"a cat sits on mat {i} {n}." for n in range(5)]
        captions += [{"image_id": i, "caption": text} for text in texts]
        for n in (1, 3):  # true captions with two foils each, and with the same id
            row = {"id": 10 * i + n, "image_id": i, "target_word": "cat", "foil_word": "ORIG"}
            annotations.append({**row, "caption": texts[n], "foil": False})
            for word in ("dog", "horse"):
                foil = texts[n].replace("cat", word)
                annotations.append({**row, "caption": foil, "foil": True, "foil_word": word})
    (folder / "foilv1.0_test_2017.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    (folder / "captions_val2014.json").write_text(json.dumps({"images": images, "annotations": captions}))


def test_foil(tmp_path):
    write_foil(tmp_path)
    rated = load_ratings("foil", tmp_path)
    assert len(rated.candidates) == 2 * 6  # one pair per image
    assert rated.ratings.ravel().tolist() == [1, 0] * 6
    for right, wrong, references, image in zip(
        rated.candidates[::2], rated.candidates[1::2], rated.references[::2], rated.images[::2], strict=True
    ):
        i, n = int(image[13:-4]), int(right[-2])
        assert right == f"a cat sits on mat {i} {n}."
        assert wrong in (right.replace("cat", "dog"), right.replace("cat", "horse"))
        assert references == [f"a cat sits on mat {i} {m}." for m in range(5) if m != n]
    assert len({tuple(load_ratings("foil", tmp_path, seed=seed).candidates) for seed in range(5)}) > 1
    one = load_ratings("foil", tmp_path, num_references=1)
    assert one.name == "foil, 1 reference"
    assert one.candidates == rated.candidates
    assert one.references == [group[:1] for group in rated.references]
    assert rated.agreement("bleu_1", num_bootstrap=0)["accuracy"] == 1
    assert rated.agreement(lambda c, r: [0] * len(c), num_bootstrap=0)["accuracy"] == 0.5


@pytest.mark.parametrize("name", ["polaris", "nebula"])
def test_tables_as_csv_and_as_parquet(tmp_path, name):
    rows = [(f"{i}.jpg", f"a  caption {i}", [f"it's {i}", "another"], i % 5 / 4) for i in range(8)]
    with (tmp_path / f"{name}_test.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "mt", "refs", "score", "imgid"])
        writer.writerows([i, mt, str(refs), score, image] for i, (image, mt, refs, score) in enumerate(rows))
    rated = load_ratings(name, tmp_path)
    assert rated.candidates == [f"a caption {i}" for i in range(8)]
    assert (rated.references, rated.images) == ([row[2] for row in rows], [row[0] for row in rows])
    assert (rated.ratings.ravel().tolist(), rated.variant) == ([row[3] for row in rows], "c")
    data = tmp_path / "hub" / "data"
    data.mkdir(parents=True)
    for part in (0, 1):
        images, texts, references, scores = zip(*rows[4 * part : 4 * part + 4], strict=True)
        pictures = [{"bytes": b"jpeg", "path": image} for image in images]
        table = {"refs": references, "human_score": np.float32(scores)}
        table |= {"cand": texts, "img": pictures} if name == "polaris" else {"mt": texts, "image": pictures}
        table |= {"file_name": images} if name == "nebula" else {}
        columns = {key: pa.array(list(values)) for key, values in table.items()}
        pq.write_table(pa.table(columns), data / f"test-{part}.parquet")
    other = load_ratings(name, tmp_path / "hub")
    assert (other.candidates, other.references, other.images) == (rated.candidates, rated.references, rated.images)
    assert other.ratings.tolist() == rated.ratings.tolist()


MODULE = """
import datasets
import evaluate

class Mine(evaluate.Metric):
    def _info(self):
        text, many = datasets.Value("string"), datasets.Sequence(datasets.Value("string"))
        features = datasets.Features({"predictions": text, "references": many})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        lengths = [len(text) for text in predictions]
        return {"mean": sum(lengths) / len(lengths), "per_sample": {"length": lengths, "zero": [0 for _ in lengths]}}
"""


def test_any_metric_can_be_compared(folder, monkeypatch):
    rated = load_ratings("flickr8k-expert", folder)
    found = rated.agreement(length, num_bootstrap=0)
    lengths = np.repeat([len(text) for text in rated.candidates], 3)
    assert found["tau"] == pytest.approx(kendalltau(lengths, rated.ratings.ravel(), variant="c").statistic)
    (folder / "mine.py").write_text(MODULE)
    (folder / "own_metric.py").write_text("def score(texts, references):\n    return [len(text) for text in texts]\n")
    (folder / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(folder)
    seen = []

    def with_images(candidates, references, images):
        seen.extend(images)
        return length(candidates, references)

    def with_option(candidates, references, power=1):
        return [len(text) ** power for text in candidates]

    same = {
        "scores": [len(text) for text in rated.candidates],
        "images": with_images,
        "option": with_option,
        "command": program_metric(f"{sys.executable} program.py"),
        "function": "own_metric:score",
        "module": "evaluate:mine.py:length",
        "bleu_1": "bleu_1",
    }
    compared = rated.agreement(same, image_dir="images", num_bootstrap=0)["metrics"]
    assert [name for name, row in compared.items() if row == found] == list(same)[:-1]
    assert str(seen[0]) == f"images/{rated.images[0]}"
    loaded = evaluate.load("mine.py")
    assert metric_function("evaluate:mine.py:zero")(["a"], [["b"]], []) == [0]
    for metric, named in (
        (loaded, "length, zero"),
        ("evaluate:mine.py:mean", "mean"),
        ("no_such:thing", "no_such"),
        ("own_metric:thing", "thing"),
        ("bleu_9", "bleu_9"),
        ("clip_score", "--scorer"),
        (lambda texts: texts, "captions and references"),
    ):
        with pytest.raises(ValueError, match=named):
            metric_function(metric)(["a", "b"], [["b"], ["c"]], [])


def test_published_numbers():
    names = typing.get_args(typing.get_type_hints(AgreementOptions)["benchmark"])
    for name in (*names, "foil, 1 reference"):
        published = published_agreement(name)
        assert "cider_d" in published
        assert set(published) <= {*TEXT_METRICS, *SCORER_METRICS}
        for row in published.values():
            assert row["source"]
            assert 0 < row["mean"] < 100
            kinds = [row[kind] for kind in ("HC", "HI", "HM", "MM") if kind in row]
            assert not kinds or np.mean(kinds) == pytest.approx(row["mean"], abs=0.06)
    assert published_agreement("pascal50s, 48 references") == {}


def test_the_command(folder, capsys):
    program = folder / "mine.py"
    program.write_text(PROGRAM)
    options = ["--benchmark", "flickr8k-expert", "--data_root", str(folder), "--num_bootstrap", "50"]
    metrics = ["--metrics", "bleu_1", "clip_score", "ref_clip_score", "--scorer", "scenes:clip-reward"]
    assert main(["agreement", *options, *metrics, "--command", f"{sys.executable} {program}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rated = load_ratings("flickr8k-expert", folder)
    scores = bleu(rated.candidates, rated.references)["per_sample"]["bleu_1"]
    for name, of in (("bleu_1", scores), ("command", [len(text) for text in rated.candidates])):
        tau = kendalltau(np.repeat(of, 3), rated.ratings.ravel(), variant="c").statistic
        assert found["metrics"][name]["tau"] == pytest.approx(tau)
    assert len(found["differences"]) == 6
    published = published_agreement("flickr8k-expert")
    assert found["metrics"]["clip_score"]["published"] == published["clip_score"]["mean"]
    assert found["metrics"]["clip_score"]["verdict"] == "CLIP ViT-B/32"  # another scorer: no verdict
    assert found["metrics"]["bleu_1"]["verdict"].startswith("differs by")
    assert found["metrics"]["command"]["published"] is None
    assert main(["agreement", *options, "--output", str(folder / "a.json")]) == 0
    assert "differs by" in capsys.readouterr().out
    assert set(json.loads((folder / "a.json").read_text())["metrics"]) == {"bleu_4", "rouge_l", "cider_d"}


def test_the_command_on_pairs(tmp_path, capsys):
    write_pascal(tmp_path)
    options = ["--benchmark", "pascal50s", "--data_root", str(tmp_path), "--metrics", "cider_d", "rouge_l"]
    assert main(["agreement", *options, "--num_bootstrap", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "20 pairs" in lines[0]
    assert [line.split()[0] for line in lines[2:7]] == ["cider_d", "HC", "HI", "HM", "MM"]
    assert "98.1" in lines[4]  # published
    assert lines[-1].startswith("cider_d - rouge_l:")
    assert main(["agreement", *options, "--num_references", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == "pascal50s, 3 references"
    assert found["metrics"]["cider_d"]["categories"]["HI"]["published"] is None


def test_judge_by_an_endpoint_is_asked_once(folder, capsys, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")

    def rates(messages):
        """A number between 0 and 100 from the length of the caption."""
        caption = texts_of(messages)[0].split("Caption: ")[1].split("\n")[0]
        return json.dumps({"score": min(len(caption), 100), "reason": ""})

    options = f"--benchmark flickr8k-expert --data_root {folder} --num_bootstrap 0 --metrics clair".split()
    with ChatServer(rates) as server:
        judge = ["--judge", "openai:m", "--judge_url", server.url, "--judge_answers", str(folder / "kept.jsonl")]
        assert main(["agreement", *options, *judge, "--max_requests", "9"]) != 0
        assert "max_requests" in capsys.readouterr().err
        assert len(server.requests) == 9
        for _ in range(2):
            assert main(["agreement", *options, *judge, "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
        rated = load_ratings("flickr8k-expert", folder)
        assert len(server.requests) == len(set(zip(rated.candidates, map(tuple, rated.references), strict=True)))
    lengths = [min(len(text), 100) for text in rated.candidates]
    tau = kendalltau(np.repeat(lengths, 3), rated.ratings.ravel(), variant="c").statistic
    assert found["metrics"]["clair"]["tau"] == pytest.approx(tau)


def test_a_judge_that_always_fails_ends_the_command(folder, capsys, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    options = ["--benchmark", "flickr8k-cf", "--data_root", str(folder), "--metrics", "clair", "--judge", "openai:m"]
    with ChatServer(str, lambda number, messages: 400) as server:
        assert main(["agreement", *options, "--judge_url", server.url]) == 1
        assert "failed 20 times in a row" in capsys.readouterr().err
        assert len(server.requests) < 30 < IMAGES**2


@pytest.mark.parametrize("name", ["flickr8k-expert", "flickr8k-cf"])
def test_damaged_lines(folder, name):
    file = folder / ("ExpertAnnotations.txt" if name == "flickr8k-expert" else "CrowdFlowerAnnotations.txt")
    good, whole = file.read_text(), load_ratings(name, folder)
    file.write_bytes(good.encode() * 4 + b"0.jpg\t\xff\xfe broken\n")
    assert load_ratings(name, folder).num_bad_lines == 1
    assert len(load_ratings(name, folder).candidates) == 4 * len(whole.candidates)
    file.write_text(good.replace(".jpg#", ".jpeg#"))
    with pytest.raises(ValueError, match="line 1"):
        load_ratings(name, folder)


def edit(file, old, new):
    return lambda folder: (folder / file).write_text((folder / file).read_text().replace(old, new))


def write(file, text="text"):
    return lambda folder: (folder / file).write_text(text)


def rename(file):
    return lambda folder: (folder / file).rename(folder / "other.txt")


def pairs_without_captions(folder):
    savemat(folder / "pair_pascal.mat", {"new_input": np.ones((1, 3)), "category": np.ones((1, 3))})


WRITERS = {"composite": write_composite, "foil": write_foil, "pascal50s": write_pascal}


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("composite", edit("30k_correctness.csv", "Q2Answer", "Q9Answer"), "30k_correctness.csv"),
        ("composite", edit("8k_correctness.csv", ";5;", ";;"), "line 1"),  # a missing rating
        ("foil", edit("captions_val2014.json", '"image_id": ', '"image_id": 9'), "no captions"),
        ("pascal50s", pairs_without_captions, "pair_pascal.mat"),
        ("nebula", write("nebula_test.csv", "a,b\n1,2\n"), "line 1"),
        ("nebula", write("test-0.parquet"), "test-0.parquet"),
    ],
)
def test_other_files_are_refused(tmp_path, name, change, named):
    WRITERS.get(name, lambda folder: None)(tmp_path)
    change(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        load_ratings(name, tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: (folder / "ExpertAnnotations.txt").unlink(), "ExpertAnnotations.txt"),
        (lambda folder: ["--metrics", "clip_score"], "--scorer"),
        (lambda folder: ["--metrics", "clair", "--judge", "gpt-4"], "--judge"),
        (lambda folder: ["--judge", "transformers:m", "--judge_url", "http://127.0.0.1:1/v1"], "--judge_url"),
        (lambda folder: ["--command", "true"], "0 numbers"),
        (lambda folder: ["--command", "no-such-program"], "--command"),
        (lambda folder: ["--command", "echo five"], "five"),
    ],
)
def test_bad_input_is_one_line(folder, change, named, capsys):
    more = change(folder) or []
    assert main(["agreement", "--benchmark", "flickr8k-expert", "--data_root", str(folder), *more]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("captionrl agreement: error: ")
    assert named in said
    assert len(said.splitlines()) == 1
