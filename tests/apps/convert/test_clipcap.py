"""Checkpoints of ClipCap's published code, and the exported code for users without the package."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import CLIPConfig, CLIPModel, CLIPVisionModelWithProjection

from hf_captionrl.apps.convert.convert import convert, read_pickle
from hf_captionrl.apps.convert.published import MODULES, export_code
from hf_captionrl.captioners import load_captioner
from tests.captioners.test_clipcap import KINDS, MAPPERS, WRITE, inputs, published_logits
from tests.offline import python_path
from tests.tiny import HIDDEN, tiny_blip, tiny_clipcap, tiny_images
from tests.tolerances import assert_close

CLIP_DIM = 24


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Folders of a CLIP and a GPT-2, as on the Hub."""
    folder = tmp_path_factory.mktemp("parts")
    model, processor = tiny_clipcap(seed=3)
    torch.manual_seed(0)
    vision = model.config.vision_config.to_dict() | {
        "projection_dim": 512
    }  # wrong, as in some published configurations
    text = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": HIDDEN}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=CLIP_DIM)).save_pretrained(
        folder / "clip"
    )
    processor.image_processor.save_pretrained(folder / "clip")
    model.language_model.save_pretrained(folder / "gpt2")
    processor.tokenizer.save_pretrained(folder / "gpt2")
    return {"vision_model": str(folder / "clip"), "language_model": str(folder / "gpt2")}


def published(model, path, *, mapper_alone=False, **changes):
    """A checkpoint in the format of the published code."""
    state = {f"clip_project.{name}": value for name, value in model.mapper.state_dict().items()}
    if not mapper_alone:
        state |= {f"gpt.{name}": value for name, value in model.language_model.state_dict().items()}
        for layer in range(2):  # buffers of old versions of transformers
            state[f"gpt.transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
            state[f"gpt.transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save({**state, **changes}, path)
    return path


@pytest.mark.parametrize("kind", MAPPERS)
def test_converted_checkpoint_equals_the_published_code(kind, parts, tmp_path):
    source, processor = tiny_clipcap(seed=7, **MAPPERS[kind])
    checkpoint = published(source, tmp_path / "weights.pt")
    settings = {"normalize_image_embeds": "normalised" in kind, "num_mapper_heads": 4}
    convert(checkpoint, tmp_path / "out", **parts, **settings)
    captioner = load_captioner(tmp_path / "out")
    model = captioner.model
    encoder = model.vision_tower.encoder
    original = CLIPModel.from_pretrained(parts["vision_model"])
    batch = inputs(processor)
    with torch.no_grad():
        expected = original.get_image_features(batch["pixel_values"]).pooler_output
        torch.testing.assert_close(model.get_image_features(batch["pixel_values"]).pooler_output, expected)
        source.vision_tower.encoder = CLIPVisionModelWithProjection(encoder.config)
        source.vision_tower.encoder.load_state_dict(encoder.state_dict())
        expected = published_logits(source, batch["pixel_values"], batch["input_ids"][:, 1:])
        logits = model(**batch).logits[:, :-1]
    kept = batch["attention_mask"][:, 1:].bool()
    assert_close(logits[kept], expected[kept], ulps=64)
    assert model.config.mapping_type == source.config.mapping_type
    assert model.config.prefix_length == source.config.prefix_length
    assert model.config.stop_at_period
    period = captioner.tokenizer.convert_tokens_to_ids(".")
    assert captioner.eos_token_id == period == captioner.end_token_ids[0]
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names
    assert not [name for name in names if name.endswith((".pt", ".bin"))]


def test_mapper_without_language_model_gets_the_published_one(parts, tmp_path):
    source, _ = tiny_clipcap(seed=7)
    checkpoint = published(source, tmp_path / "weights.pt", mapper_alone=True)
    report = convert(checkpoint, tmp_path / "out", **parts, stop_at_period=False)
    assert "only the mapper" in report.notes[0]
    model = load_captioner(tmp_path / "out").model
    reference, _ = tiny_clipcap(seed=3)
    for left, right in zip(model.language_model.parameters(), reference.language_model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(model.mapper.model[0].weight, source.mapper.model[0].weight)
    assert not model.config.stop_at_period


class Evil:
    """A malicious pickle."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_with_code_raise_and_are_not_executed(tmp_path):
    touched = tmp_path / "touched"
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps({"clip_project.model.0.weight": Evil(touched)}))
    torch.save({"clip_project.model.0.weight": Evil(touched)}, tmp_path / "zip.pt")
    for path in (plain, tmp_path / "zip.pt"):
        with pytest.raises(ValueError, match="not a plain file of tensors"):
            read_pickle(path)
        assert not touched.exists()
    pickle.loads(plain.read_bytes())  # control: a plain load executes the code
    assert touched.exists()
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty.pt").write_text("")
    for name in ("text.pt", "empty.pt"):
        with pytest.raises(ValueError, match="not a plain file of tensors") as caught:
            read_pickle(tmp_path / name)
        assert "weights_only" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"^There is no file '.*nowhere.pt'\. Use"):
        read_pickle(tmp_path / "nowhere.pt")
    torch.save({"epoch": 3}, tmp_path / "epoch.pt")
    with pytest.raises(ValueError, match=r"epoch\.pt contains 'epoch', a int, among its tensors"):
        read_pickle(tmp_path / "epoch.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt has no state dict"):
        read_pickle(tmp_path / "list.pt")
    torch.save({"weight": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="has tensors such as weight, which are not names of the published code"):
        convert(tmp_path / "other.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpt.transformer.wte.weight": torch.ones(9, 64)}, r"wte.weight is \(9, 64\) instead of \(270, 64\)"),
        ({"clip_project.model.0.bias": torch.ones(5)}, r"mapper.model.0.bias is \(5,\) instead of \(96,\)"),
        ({"clip_project.model.0.weight": torch.ones(96, 99)}, r"\(96, 99\) instead of \(96, 24\)"),
        ({"clip_project.model.2.weight": torch.ones(65, 96)}, r"output \(65\) is not a multiple"),
        ({"gpt.transformer.h.2.ln_1.weight": torch.ones(64)}, "h.2.ln_1.weight is unknown"),
        ({"optimizer.step": torch.ones(1)}, "optimizer.step belongs to neither"),
        ({"clip_project.prefix_const": torch.ones(3, 48)}, "language model of width 48, not 64"),
    ],
)
def test_tensors_that_do_not_match_raise(changes, message, parts, tmp_path):
    checkpoint = published(tiny_clipcap()[0], tmp_path / "weights.pt", **changes)
    with pytest.raises(ValueError, match=message):
        convert(checkpoint, tmp_path / "out", **parts)
    assert not (tmp_path / "out").exists()


def test_missing_tensor_raises(parts, tmp_path):
    source, _ = tiny_clipcap()
    state = torch.load(published(source, tmp_path / "weights.pt"), weights_only=True)
    del state["gpt.transformer.ln_f.bias"]
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"ln_f.bias is missing"):
        convert(tmp_path / "weights.pt", tmp_path / "out", **parts)
    del state["clip_project.model.2.weight"]
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="neither the published MLP"):
        convert(tmp_path / "weights.pt", tmp_path / "out", **parts)


# First without, then with trust_remote_code.
REMOTE = (
    """
from transformers import AutoModelForImageTextToText
import sys
try:
    AutoModelForImageTextToText.from_pretrained(sys.argv[1], trust_remote_code=False)
    raise SystemExit("was not asked")
except ValueError as error:
    assert "trust_remote_code" in str(error), error
OPTIONS = {"trust_remote_code": True}
"""
    + WRITE
)


def run(code, folder, cwd, home):
    environment = {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow  # a fresh process without the package
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_exported_code_gives_identical_outputs_without_the_package(kind, tmp_path):
    model, processor = tiny_clipcap(**MAPPERS[kind])
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    pixel_values = processor(images=tiny_images(2), return_tensors="pt")["pixel_values"]
    torch.save(pixel_values, folder / "pixels.tensor")
    written = model.generate(pixel_values, max_new_tokens=5, do_sample=False).tolist()
    assert len(export_code(folder)) == len(MODULES) + 2
    done = run(REMOTE, folder, tmp_path, tmp_path / "home")
    assert done.returncode == 0, done.stderr[-3000:]
    ids, kinds, modules, ours = json.loads(done.stdout.splitlines()[-1])
    assert (ids, kinds, ours) == (written, KINDS, False)
    assert all(module.startswith("transformers_modules.") for module in modules)
    # With the package installed, its classes are used, and no code of the folder runs.
    for name in MODULES:
        (folder / f"{name}.py").write_text("raise SystemExit('run')")
    captioner = load_captioner(folder)
    assert type(captioner.model).__module__ == "hf_captionrl.captioners.clipcap.modeling_clipcap"
    assert captioner.model.generate(pixel_values, max_new_tokens=5, do_sample=False).tolist() == written


def test_only_clipcap_is_exported(tmp_path):
    model, processor = tiny_blip()
    with pytest.raises(ValueError, match=r"no config\.json"):
        export_code(tmp_path)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'blip', not 'clipcap'"):
        export_code(tmp_path)
    assert not list(tmp_path.glob("*.py"))
