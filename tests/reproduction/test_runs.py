"""The campaign: what is finished is not run again, what was killed resumes, results know their settings, and the pages are those of the
results; on the papers' data, what rows need, in which order they run, and where they start."""

from __future__ import annotations

import functools
import importlib
import json
import threading
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.clipcap.assembly import assemble
from hf_captionrl.cli.main import main
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils.io import write_json
from reproduction import findings, real, reproduce, run_seeds, runs
from reproduction.make_paper_index import PAPERS, load_rows, until_of
from reproduction.measurements import look_up, measured, shown
from reproduction.runs import CONFIGS, Run, execute, finished, in_order, moved_targets, presets_of, to_run, words_of
from scripts.docs_hooks import generated_pages, on_page_markdown
from tests.apps.convert.test_published import original_blip, published, saved
from tests.retrieval.tiny_scorers import make_clip
from tests.tiny import tiny_blip, tiny_clipcap, tiny_images

ROOT = Path(__file__).parents[2]
RUNS = reproduce.load_runs()
RESULTS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "reproduction/results").glob("*.json")}
PRESET = "smile/scenes/table5"


TINY = Run(
    name="tiny",
    preset="none",
    minutes=1,
    seeds=[0, 1],
    steps=["python make.py --first", "for each seed s: python train.py --seed s --output_dir {folder}/seed-s"],
)


def write_result(path, **changed):
    record = {"commands": list(TINY.steps), "seeds": [0, 1], "versions": {"hf_captionrl": version("hf_captionrl")}}
    path.mkdir(exist_ok=True)
    (path / "tiny.json").write_text(json.dumps(record | changed))


def test_a_result_counts_if_settings_and_seeds_are_the_same(tmp_path):
    assert finished(TINY, [0, 1], tmp_path) is None
    write_result(tmp_path)
    assert finished(TINY, [0, 1], tmp_path) is not None
    assert finished(TINY, [0, 1, 2], tmp_path) is None
    moved = [TINY.steps[0].replace("make.py", "elsewhere/make.py"), TINY.steps[1].replace("{folder}", "outputs")]
    for same in ({"commands": moved}, {"versions": {"hf_captionrl": "0.0.0"}}):
        write_result(tmp_path, **same)
        assert finished(TINY, [0, 1], tmp_path) is not None
    other = [TINY.steps[0].replace("--first", "--second"), TINY.steps[1]]
    for changed in ({"commands": ["python other.py"]}, {"commands": other}, {"seeds": [0]}):
        write_result(tmp_path, **changed)
        assert finished(TINY, [0, 1], tmp_path) is None


@pytest.mark.parametrize("killed_after", [0, 2])
def test_a_killed_run_resumes(tmp_path, killed_after):
    """The whole run in two halves does each step once, and the step at which it was killed twice."""
    output, runs_dir, called = tmp_path / "results", tmp_path / "runs", []

    def caller(words, folder=None, *, stop=None):
        called.append(" ".join(words[1:]))
        if len(called) - 1 == stop:
            raise KeyboardInterrupt
        write_result(output)
        return 0

    arguments = {"output": output, "runs_dir": runs_dir, "others": {"tiny": TINY}, "told": lambda text: None}
    with pytest.raises(KeyboardInterrupt):
        execute(TINY, [0, 1], caller=lambda words: caller(words, stop=killed_after), **arguments)
    assert execute(TINY, [0, 1], caller=caller, **arguments) is None
    folder = TINY.folder(runs_dir)
    steps = ["make.py --first", *(f"train.py --seed {s} --output_dir {folder}/seed-{s}" for s in (0, 1))]
    assert called == [*steps[: killed_after + 1], *steps[killed_after:]]
    assert finished(TINY, [0, 1], output)["hardware"] == runs.hardware()
    called.clear()
    execute(TINY, [0, 1, 2], caller=caller, **arguments)
    assert [call for call in called if "--seed" in call] == [f"train.py --seed 2 --output_dir {folder}/seed-2"]


def test_what_fails_or_is_missing_is_said(tmp_path):
    arguments = {"output": tmp_path, "runs_dir": tmp_path, "others": {}, "told": lambda text: None}
    assert "exit code 3 of `python make.py" in execute(TINY, [0], caller=lambda words: 3, **arguments)

    def failing(selected):
        """A recipe that writes its row, and fails."""

        def caller(words):
            if "--output_dir" not in words:
                write_result(tmp_path)
                return 0
            write_json(Path(words[-1]) / "results.json", {"selected": {"SR": selected}})
            return 1

        return caller

    assert "exit code 1" in execute(TINY, [0], caller=failing({"step": 50}), **arguments)
    assert execute(TINY, [0], caller=failing({"collapsed": "loops"}), **arguments) is None
    needy = Run(name="needy", preset="", minutes=1, command="python x.py", needs=["no-such-program"])
    assert execute(needy, [], caller=lambda words: 0, **arguments) == "needs no-such-program"
    other = Run(name="tiny", preset="none", minutes=1, seeds=[0, 1], steps=[*TINY.steps, "python more.py"])
    assert other.folder(tmp_path) != TINY.folder(tmp_path)


def test_a_row_can_be_where_a_curve_reaches_another_result(tmp_path, monkeypatch):
    write_result(tmp_path, rows=[{"name": "SR", "x": {"values": [0.5, 0.7]}}])
    steps = {"steps": ["python x.py"], "rows": {"until": ["{folder}/sr", "trained"]}}
    run = Run("g", PRESET, 1, seeds=[0, 1], until={"until": ["tiny", "rows/SR/x"]}, **steps)
    points = [{"step": step, "x": x, "y": step / 10} for step, x in ((0, 0.4), (10, 0.55), (20, 0.5), (30, 0.8))]
    record = {"rows": [{"name": "MLE"}, {"name": "SR", "x": 0.9}], "learning_curves": {"SR": points}}
    for seed in (0, 1):
        place = run.folder(tmp_path) / "sr" / f"seed-{seed}"
        name = ("results.json", "comparison.json")[seed]  # of a recipe or of `captionrl evaluate`
        write_json(place / name, record | {"versions": {"git_revision": "ab"[seed]}})
    settings = {"output": tmp_path, "runs_dir": tmp_path, "others": {}, "told": lambda text: None}
    assert execute(run, [0, 1], caller=lambda words: 0, **settings) is None
    found = finished(run, [0, 1], tmp_path)
    assert found["settings"] == runs.digests([PRESET], CONFIGS)
    assert found["revisions"] == ["a", "b"]
    # From 0.4 to 0.55 in ten steps, and from 0.5 to 0.8.
    assert measured("rows/until/step", found).values == pytest.approx((10 * 0.1 / 0.15, 20 + 10 * 0.2 / 0.3))
    assert measured("rows/until/x", found).values == pytest.approx((0.5, 0.7))
    assert measured("rows/until/y", found).values == pytest.approx((0.1 / 0.15, 2 + 0.2 / 0.3))
    assert not to_run(run, [0, 1], tmp_path)
    write_result(tmp_path, rows=[{"name": "SR", "x": {"values": [0.3, 0.41]}}])
    assert moved_targets(run, found, tmp_path) == ["until"]
    assert to_run(run, [0, 1], tmp_path)
    assert execute(run, [0, 1], caller=lambda words: 0, **settings) is None
    assert not to_run(run, [0, 1], tmp_path)
    with monkeypatch.context() as changed:
        changed.setattr(runs, "digests", lambda presets, configs: dict.fromkeys(presets, "another preset"))
        assert to_run(run, [0, 1], tmp_path)
    # The first one starts above its target: its first evaluation counts, not the captioner before training.
    steps = measured("rows/until/step", finished(run, [0, 1], tmp_path)).values
    assert steps == pytest.approx((10.0, 10 * 0.01 / 0.15))
    write_result(tmp_path, rows=[{"name": "SR", "x": {"values": [0.5, 0.95]}}])
    assert execute(run, [0, 1], caller=lambda words: 0, **settings).startswith(
        "until: x does not reach 0.950 with seed 1"
    )
    write_result(tmp_path, seeds=[0], rows=[{"name": "SR", "x": {"values": [0.5]}}])
    assert execute(run, [0, 1], caller=lambda words: 0, **settings) == "until: the other result has no seed 1."
    (tmp_path / "tiny.json").unlink()
    started = []
    assert execute(run, [0, 1], caller=started.append, **settings) == "needs the results of tiny"
    assert not started


def test_check_says_which_result_is_stale_or_of_a_checkout_with_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reproduce.index, "faults", lambda *_: [])
    record = json.loads((ROOT / "reproduction/results/smile_blip_seeds.json").read_text())
    record["settings"]["smile_blip/scenes"] = "0" * 16
    monkeypatch.setattr(reproduce, "load_runs", lambda: {"smile_blip_seeds": RUNS["smile_blip_seeds"]})
    monkeypatch.setattr(reproduce, "_results", lambda *_: {})
    assert reproduce.main(["--check"]) == 1
    assert "smile_blip_seeds.json is not recognised" in capsys.readouterr().out
    monkeypatch.setattr(reproduce, "_results", lambda *_: {"smile_blip_seeds": record})
    assert reproduce.main(["--check"]) == 1
    assert "smile_blip_seeds.json is stale: its preset smile_blip/scenes changed" in capsys.readouterr().out
    record["settings"]["smile_blip/scenes"] = "unknown"
    assert reproduce.main(["--check"]) == 0
    assert "smile_blip_seeds.json does not say the settings of its preset smile_blip/scenes" in capsys.readouterr().out
    for name, state in (("clean", ""), ("of/made", "+changes")):
        write_json(tmp_path / f"{name}.json", {"versions": {"git_revision": f"f00{state}"}})
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path)
    assert reproduce.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("of/made.json was made from a checkout with changes.\n")


def test_presets_differ_from_the_papers_only_as_the_page_says():
    sections = dict(text.split("\n", 1) for text in generated_pages()["presets.md"].split("\n## ")[1:])
    table = sections["ndlb/scenes/generic-lv"]
    assert "| `learning_rate` | `0.0003` | `9e-08` |" in table
    assert "| `lr_scheduler_type` | – | `constant` |" in table
    assert not {"`temperature`", "`baseline`", "`lora_r`"} & set(table.split())  # as in the paper


def test_every_figure_of_the_index_is_on_the_page():
    page = generated_pages()["reproduction.md"]
    sections = dict(zip(PAPERS, page.split("\n## ")[1:], strict=True))
    for row in load_rows():
        for entry in row.get("numbers", ()):
            name = f"[{row['kind'].capitalize()} {row['number']}]"
            lines = sections[row["paper"]].splitlines()
            (line,) = [text for text in lines if name in text and f" | {entry['what']} |" in text]
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert cells[2] == (shown(entry["paper"]) if "paper" in entry else "")
            if "run" in entry:
                found = look_up(entry["at"], RESULTS[entry["run"]])
                assert cells[3] == shown(found if isinstance(found, float) else found.get("mean", found.get("value")))
            else:
                assert cells[3] == ""
                assert cells[7].startswith("not run: "), line


def test_the_committed_results_are_up_to_date_and_those_of_the_runs(capsys):
    assert reproduce.main(["--check"]) == 0, capsys.readouterr().out
    assert [
        name for name, run in RUNS.items() if finished(run, run.seeds, ROOT / "reproduction/results") is None
    ] == []
    assert "{" not in "".join(findings.pages(RESULTS).values())
    commands = {row.get("command") for row in load_rows()}
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "reproduction").glob("*.md")]
    guides = "\n".join([*(on_page_markdown(page.read_text()) for page in pages), generated_pages()["full_tables.md"]])
    for run in RUNS.values():
        if not run.steps and "run_seeds" in run.command:
            command, recorded = (
                run.recorded(run.seeds, f"reproduction/results/{run.name}"),
                RESULTS[run.name]["command"],
            )
            # A run of no paper's row is on a page, or in the full tables.
            assert command in commands or command in guides or recorded in guides, run.name


@pytest.mark.parametrize(
    "name", [n for n, run in RUNS.items() if run.command.startswith("python reproduction/run_seeds")]
)
def test_seeds_run_the_preset_that_their_result_states(monkeypatch, tmp_path, name):
    """Also where the recipe's default has become another one."""

    def call(words, **kwargs):
        raise RuntimeError(" ".join(words).replace(f"{ROOT}/", ""))

    words = words_of(RUNS[name].recorded([0], str(tmp_path / name)))[1:]
    monkeypatch.setattr(run_seeds.subprocess, "run", call)
    monkeypatch.setattr("sys.argv", [*words[:2], "--runs_dir", str(tmp_path), *words[2:]])
    with pytest.raises(RuntimeError) as called:
        run_seeds.main()
    assert presets_of("", str(called.value)) == [RUNS[name].preset]


@pytest.mark.parametrize("processes", [1, 4])
def test_runs_start_after_those_they_need_and_use_the_processes(processes):
    needs = {"d": {"c"}, "a": set(), "b": set(), "c": {"a", "elsewhere"}}
    lock, together, most, ended = threading.Lock(), [], [], []

    def work(name):
        with lock:
            assert needs[name] & needs.keys() <= set(ended)
            together.append(name)
            most.append(len(together))
        time.sleep(0.05)
        with lock:
            together.remove(name)
            ended.append(name)

    in_order(needs, work, processes)
    assert sorted(ended) == ["a", "b", "c", "d"]
    assert max(most) == min(processes, 2)
    with pytest.raises(ValueError, match="cycle"):
        in_order({"a": {"b"}, "b": {"a"}}, print, 2)


# --- On the papers' data ---


NDLB_DATA = "dataset_coco.json images truematch boosted/train/captions.parquet boosted/test/captions.parquet".split()
MODELS = ("openai/clip-vit-base-patch32", "openai/clip-vit-large-patch14", "openai-community/gpt2")


def make_data(data):
    for name in (*NDLB_DATA, *(f"models/{name}" for name in MODELS)):
        (data / name).mkdir(parents=True)


def test_every_preset_of_the_index_says_what_it_needs(tmp_path):
    presets = reproduce._presets(load_rows())
    assert real.is_embedded("smile/scenes/figure4a-random")
    rows = [row for row in load_rows() if row["kind"] == "table"]
    assert {line["preset"] for row in rows for line in row["lines"] if "preset" in line} <= set(presets)
    for preset in presets:
        assert "scenes" not in str(real.settings_of(preset)), preset
        assert real.missing_of(preset, None), preset
        recipe, option, value, *_ = real.arguments_of(preset, tmp_path, 0, tmp_path / "out")
        assert (ROOT / recipe).is_file()
        assert option == ("--config" if value.endswith(".yaml") else "--row")
        assert value in (preset, f"recipes/configs/{preset}.yaml")


def test_a_preset_runs_where_its_data_are(tmp_path):
    preset, data, called = "discritune/coco", tmp_path / "data", []
    arguments = {"output": tmp_path / "out", "runs_dir": tmp_path / "runs", "told": lambda text: None}
    said = real.run_preset(preset, data, [0], caller=lambda words: 1, **arguments)
    assert said.startswith("models/clipcap-coco, models/openai/clip-vit-large-patch14, ")
    make_data(data)
    (data / "models/clipcap-coco").mkdir()

    def caller(words):
        called.append(words)
        rows = [{"name": "MLE", "cider_d": 1.0}, {"name": "SR (random)", "cider_d": 0.5 + len(called)}]
        found = {"rows": rows, "selected": {"SR (random)": {"step": len(called)}}}
        write_json(Path(words[words.index("--output_dir") + 1]) / "results.json", found)
        return 0

    assert real.run_preset(preset, data, [0, 1], caller=caller, **arguments) is None
    assert real.run_preset(preset, data, [0, 1], caller=caller, **arguments) is None
    assert len(called) == 2
    assert called[0][called[0].index("--image_root") + 1] == str(data / "images")
    record = json.loads(real.result_path(preset, tmp_path / "out").read_text())
    assert measured("trained/cider_d", record).values == (1.5, 2.5)
    assert record["selected"] == [{"SR (random)": {"step": 1}}, {"SR (random)": {"step": 2}}]
    assert str(tmp_path) not in json.dumps(record["commands"])


def test_what_a_start_needs_is_missing_instead_of_the_start(tmp_path):
    preset, start = "ndlb/table5/row8", "models/ndlb/table11/holisticcap/model"
    assert real.makers_of(preset) == {"model_name_or_path": "ndlb/table11/holisticcap"}
    assert real.makers_of("smile_blip/coco") == real.makers_of("ndlb/table11/coco") == {}
    make_data(tmp_path)
    assert real.missing_of(preset, tmp_path) == []
    (tmp_path / "models/openai-community/gpt2").rmdir()  # only maximum likelihood begins with it
    assert real.missing_of(preset, tmp_path) == ["models/openai-community/gpt2"]
    (tmp_path / start).mkdir(parents=True)
    assert real.missing_of(preset, tmp_path) == []
    assert start not in real.missing_of(preset, None)
    # A preset whose curve has to reach the result of another one comes after it.
    until = until_of(load_rows())
    assert until["ndlb/table14/coco"] == ["ndlb/table4/row2", "trained/reward_rd100_recall_at_1"]
    ordered = real.with_makers(["ndlb/table14/coco"], None, until)
    assert list(ordered)[-2:] == ["ndlb/table4/row2", "ndlb/table14/coco"]
    assert "ndlb/table4/row2" in ordered["ndlb/table14/coco"]
    make_data(tmp_path / "data")
    folders = {"output": tmp_path / "out", "runs_dir": tmp_path / "runs", "caller": None}
    said = real.run_preset(preset, tmp_path / "data", [0], **folders)
    assert said == "the model of ndlb/table11/holisticcap is not there, which it needs"


def small_run(words):
    """What `call` does, in this process and with short captions."""
    if "hf_captionrl.cli" in words:
        return main(words[words.index("convert") :])
    recipe, *options = words[words.index("accelerate.commands.launch") + 1 :]
    small = "--generation_max_new_tokens 6 --use_cpu --disable_tqdm true --num_train_epochs 0".split()
    importlib.import_module(f"recipes.{Path(recipe).stem}").main([*options, *small])
    return 0


def test_released_checkpoints_are_converted_evaluated_and_compared(tmp_path, monkeypatch, capsys):
    """From the authors' files, with tiny weights, to the table of published numbers."""
    data, models, images = tmp_path / "data", tmp_path / "data/models", tiny_images(8, size=24)
    (data / "images").mkdir(parents=True)
    (data / "checkpoints").mkdir()
    rows = []
    for number, image in enumerate(images):
        image.save(data / "images" / f"{number}.png")
        row = {
            "filename": f"{number}.png",
            "imgid": number,
            "cocoid": number,
            "split": "test" if number > 2 else "val",
        }
        rows.append(row | {"sentences": [{"raw": f"a red cat {number}", "tokens": []}]})
    write_json(data / "dataset_coco.json", {"images": [*rows, rows[0] | {"imgid": 9, "cocoid": 9, "split": "train"}]})
    bags = [[3, 4, 5], [6, 7, 2]]
    for size in (3, 5, 7):
        write_json(data / f"truematch/benchmark/{size}.json", bags if size == 3 else [list(range(1, size + 1))])
    model, processor = tiny_blip(seed=3)
    saved(model, processor, models / "Salesforce/blip-image-captioning-base")
    clip, gpt2 = models / "openai/clip-vit-base-patch32", models / "openai-community/gpt2"
    clipcap, clipcap_processor = tiny_clipcap()
    for folder, parts in {clip: make_clip(), gpt2: (clipcap.language_model, clipcap_processor.tokenizer)}.items():
        for part in parts:
            part.save_pretrained(folder)
    published(assemble(clip, gpt2)[0], data / "checkpoints/coco_weights.pt")
    torch.save({"model": original_blip(model), "epoch": 3}, data / "checkpoints/blip_smile_base.pth")
    (data / "checkpoints/blip_mle_smile_base.pth").write_bytes(b"no checkpoint")
    monkeypatch.setenv("CAPTIONRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(reproduce, "run_preset", functools.partial(real.run_preset, caller=small_run))
    names = [f"released/{name}" for name in ("blip", "smile", "mle-smile", "truematch")]
    options = ["--data_root", str(data), "--output", str(tmp_path), "--runs_dir", str(tmp_path / "runs")]
    assert reproduce.main(["--only", *names, *options]) == 1
    output = " ".join(capsys.readouterr().out.split())

    source = load_captioner(model, processor=processor, prompt="a picture of ")
    batch = source.encode_images(images[3:])
    captions = source.generate(**batch, num_beams=3, do_sample=False, max_new_tokens=6).captions
    words = sum(len(caption.split()) for caption in captions) / 5
    assert f"released/smile │ length in words │ 22.30 │ {words:.2f} │ {words - 22.3:+.3f} │" in output
    scorer, captioner = load_scorer(clip), load_captioner(models / "clipcap-coco")
    batch = captioner.encode_images(images)
    texts = captioner.generate(**batch, num_beams=5, do_sample=False, max_new_tokens=6).captions
    similar = scorer.text_features(texts) @ scorer.image_features(images).T
    hits = sum(int(similar[image, bag].argmax()) == bag.index(image) for bag in bags for image in bag) / 6
    assert f"released/truematch │ R@1 in bags of 3 │ 0.508 │ {hits:.3f} │ {hits - 0.508:+.3f} │" in output
    assert "released/blip: models/blip-coco-finetuned not in the data root" in output
    assert "released/mle-smile: exit code 2 of" in output  # no weights, no number
    assert "released/mle-smile │" not in output
