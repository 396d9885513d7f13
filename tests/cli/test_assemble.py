"""`captionrl assemble`: the parts of the captioner are those of the checkpoints, and what cannot be assembled is said at once."""

import errno
import json
import shutil

import pytest
import torch
import transformers
from transformers import AutoModel

from hf_captionrl.captioners import load_captioner
from hf_captionrl.cli.main import main
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.retrieval.scorer import assemble_scorer
from hf_captionrl.utils.model_files import load_language_model, model_path
from recipes import scorer as scorer_recipe
from tests.tiny import tiny_images, tiny_tower
from tests.tiny.chat import chat_tokenizer
from tests.tolerances import assert_close

LANGUAGE = "scenes:gpt2-perplexity"
SAVE = "transformers.tokenization_utils_base.PreTrainedTokenizerBase.save_pretrained"


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    return tiny_tower(tmp_path_factory.mktemp("tower"))


def test_assembles_the_parts(tower, tmp_path, capsys):
    out = tmp_path / "clipcap"
    assert main(["assemble", str(tower), LANGUAGE, str(out), "--prefix_length", "3", "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["parameters"]
    captioner = load_captioner(str(out))
    assert sum(sizes.values()) == sum(p.numel() for p in captioner.base_model.parameters())
    parts = captioner.base_model.state_dict()
    for prefix, expected in (
        ("vision_tower.encoder.", AutoModel.from_pretrained(tower).state_dict()),
        ("language_model.", load_language_model(model_path(LANGUAGE)).state_dict()),
    ):
        for name, value in expected.items():
            assert torch.equal(parts[prefix + name].float(), value.float()), name
    assert captioner.base_model.config.prefix_length == 3
    assert captioner.generate(**captioner.encode_images(tiny_images(2)), max_new_tokens=3).captions
    again = tmp_path / "again"
    assert main(["assemble", str(tower), LANGUAGE, str(again), "--prefix_length", "3"]) == 0
    other = tmp_path / "other"
    assert main(["assemble", str(tower), LANGUAGE, str(other), "--prefix_length", "3", "--seed", "1"]) == 0
    files = [(folder / "model.safetensors").read_bytes() for folder in (out, again, other)]
    assert files[0] == files[1]
    assert files[0] != files[2]  # the mapper


def test_the_embedding_of_a_resnet_is_one_row_per_image(tower, tmp_path):
    folder, out = tmp_path / "resnet", tmp_path / "clipcap"
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    transformers.ResNetModel(config).save_pretrained(folder)  # pools to (B, 16, 1, 1)
    shutil.copy(tower / "preprocessor_config.json", folder)
    assert main(["assemble", str(folder), LANGUAGE, str(out)]) == 0
    captioner = load_captioner(str(out))
    assert len(captioner.generate(**captioner.encode_images(tiny_images(2)), max_new_tokens=3).captions) == 2


def test_an_assembled_scorer_can_be_trained(tower, tmp_path):
    """The encoders are those of the checkpoints; `train scorer` scales the projection of the images only once."""
    text, out = "scenes:clip-reward", tmp_path / "scorer"
    for part in assemble_scorer(str(tower), text):
        part.save_pretrained(out)
    scorer = load_scorer(str(out))
    weights = scorer.model.state_dict()
    whole = AutoModel.from_pretrained(model_path(text), dtype=torch.float32)
    for prefix, expected in (
        ("vision_model.", AutoModel.from_pretrained(tower).state_dict()),
        ("text_model.", whole.text_model.state_dict()),
    ):
        for name, value in expected.items():
            assert torch.equal(weights[prefix + name], value.to(weights[prefix + name].dtype)), name
    width = whole.text_model.config.hidden_size
    assert torch.equal(weights["text_projection.weight"], torch.eye(width))
    images, captions = scorer.image_features(tiny_images(3)), scorer.text_features(["a red ball", "a ship"])
    assert (images.shape, captions.shape) == ((3, width), (2, width))
    # The text encoder of the checkpoint, and the projection, in steps.
    tokens = scorer.tokenizer(["a red ball"], return_tensors="pt")
    pooled = whole.text_model(**{k: v for k, v in tokens.items() if k != "token_type_ids"}).pooler_output
    assert_close(captions[0], torch.nn.functional.normalize(pooled[0].float(), dim=-1), ulps=64)

    parts, *_ = scorer_recipe.parse_args(["--vision", "a", "--text=b"])
    assert (parts.vision_model, parts.text_model) == ("a", "b")
    settings = "--max_train_images 40 --max_eval_images 20 --max_test_images 20 --num_train_epochs 1 --seed 3".split()
    settings += "--use_cpu --disable_tqdm true --per_device_train_batch_size 20".split()
    config, trained = str(scorer_recipe.CONFIGS / "scenes.yaml"), tmp_path / "trained"

    def train(start, folder, *more):
        cache = ["--feature_cache_dir", str(tmp_path / "cache"), "--output_dir", str(folder)]
        scorer_recipe.main(["--config", config, *settings, *cache, "--model_name_or_path", str(start), *more])
        return load_scorer(str(folder / "model")).model

    first = train(out, trained)
    frozen = [name for name in weights if name.startswith("vision_model.")]
    assert all(torch.equal(first.state_dict()[name], weights[name]) for name in frozen)
    assert not torch.equal(first.visual_projection.weight, weights["visual_projection.weight"])
    # Training continues from the weights of a trained scorer: with a learning rate of 0 they stay equal.
    still = train(trained / "model", tmp_path / "again", "--learning_rate", "0", "--projection_learning_rate", "0")
    assert torch.equal(still.visual_projection.weight, first.visual_projection.weight)
    with pytest.raises(ValueError, match="model_name_or_path"):
        train(tower, tmp_path / "other")


def test_an_incomplete_folder_is_never_there(tower, tmp_path, capsys, monkeypatch):
    def full(self, folder, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "new" / "clipcap"
    command = ["assemble", str(tower), LANGUAGE, str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(SAVE, full)
        assert main(command) != 0
    assert not list(out.parent.iterdir())
    assert main(command) == 0
    assert load_captioner(str(out))


def test_bad_parts_are_one_line(tower, tmp_path, capsys):
    out, full = tmp_path / "out", tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    narrow, endless = tmp_path / "narrow", tmp_path / "endless"
    tower_of_no_width = transformers.MobileNetV2Config(depth_multiplier=0.1, image_size=32)
    transformers.MobileNetV2Model(tower_of_no_width).save_pretrained(narrow)
    shutil.copytree(model_path(LANGUAGE), endless)
    settings = json.loads((endless / "tokenizer_config.json").read_text())
    (endless / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    (endless / "special_tokens_map.json").unlink(missing_ok=True)
    for vision, language, output, named in (
        (str(tower), LANGUAGE, str(full), "not empty"),
        (str(tmp_path / "missing"), LANGUAGE, str(out), "missing"),
        (LANGUAGE, LANGUAGE, str(out), "image processor"),
        (str(narrow), LANGUAGE, str(out), "hidden_size"),
        (str(tower), str(endless), str(out), "eos_token"),
    ):
        assert main(["assemble", vision, language, output]) == 2, named
        error = capsys.readouterr().err.splitlines()[-1]  # the progress bars of transformers precede it
        assert error.startswith("captionrl assemble: error:")
        assert named in error
    assert not out.exists()


def write_gguf(gguf, file, model, tokenizer, without=""):
    writer = gguf.GGUFWriter(file, "llama")
    numbers = {"context_length": 2048, "embedding_length": 32, "feed_forward_length": 64, "block_count": 1}
    numbers |= {"head_count": 4, "head_count_kv": 4, "layer_norm_rms_eps": 1e-6, "vocab_size": len(tokenizer)}
    numbers |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(value)
    parts = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(parts["vocab"], key=parts["vocab"].get))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokenizer))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in parts["merges"]])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for key, value in model.state_dict().items():
        if "q_proj" in key or "k_proj" in key:  # llama.cpp orders the halves of a rotation differently
            value = value.view(4, 2, 4, 32).transpose(1, 2).reshape(32, 32)
        if key != without:
            writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_language_models_in_gguf_files_are_the_same_models(tower, tmp_path, capsys):
    gguf = pytest.importorskip("gguf", reason="without the library gguf, transformers reads no GGUF files")
    tokenizer, size = chat_tokenizer(()), {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_attention_heads=4, tie_word_embeddings=False, **size
    )
    model, folder = transformers.LlamaForCausalLM(config), tmp_path / "language"
    folder.mkdir()
    write_gguf(gguf, folder / "model.gguf", model, tokenizer)
    assert main(["assemble", str(tower), str(folder), str(tmp_path / "out")]) == 0
    captioner = load_captioner(tmp_path / "out")
    found = captioner.base_model.language_model.state_dict()
    for key, value in model.state_dict().items():
        assert_close(found[key][: len(value)], value)  # transformers adds a token
    assert captioner.tokenizer("a red cat").input_ids == tokenizer("a red cat").input_ids
    write_gguf(gguf, folder / "model.gguf", model, tokenizer, without="model.norm.weight")
    assert main(["assemble", str(tower), str(folder), str(tmp_path / "other")]) == 2
    assert "lacks weights of" in capsys.readouterr().err
