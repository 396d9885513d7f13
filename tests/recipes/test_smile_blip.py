"""The recipe from the command line's arguments to every file it promises."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, BlipConfig, BlipForConditionalGeneration, BlipImageProcessor, BlipProcessor

from hf_captionrl.captioners import load_captioner
from hf_captionrl.metrics.columns import COLUMNS
from recipes import smile_blip as recipe
from tests.recipes.short_runs import GENERATION

RECIPES = Path(__file__).parents[2] / "recipes"
ONE_EPOCH = [
    *("--num_train_epochs", "1", "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "32"),
    *GENERATION,
]
SHORT = [*("--max_train_images", "16", "--max_eval_images", "12", "--max_test_images", "105"), *ONE_EPOCH]


def test_results_have_the_expected_rows_and_columns(run):
    results = json.loads((run / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["MLE", "MLE+MLE", "SMILE", "SMILE (lambda=0.01)", "references"]
    assert {"rows", "seed", "config", "versions"} <= results.keys()
    for row in results["rows"]:
        for column in COLUMNS:
            assert isinstance(row[column.key], float), (row["name"], column.key)
        for size in (3, 5, 7):
            assert 0 <= row[f"bag_{size}_recall_at_1"] <= 1
    references = results["rows"][-1]
    assert 0 < references["hallucination"] < 0.06  # annotators make mistakes
    assert results["config"]["SmileBlipConfig"]["mle_weight"] == 0.0
    assert {"torch", "transformers"} <= results["versions"].keys()


def test_everything_is_written(run):
    for name in ("results.md", "gallery.html", "curves.png", "model/README.md", "model/model.safetensors"):
        assert (run / name).stat().st_size > 100, name
    html = (run / "gallery.html").read_text()
    assert "SMILE (lambda=0.01)" in html
    card = (run / "model" / "README.md").read_text()
    assert "model-index" in card
    assert "hallucination" in card.lower()


def test_the_checkpoint_captions(run):
    captioner = load_captioner(str(run / "model"), dtype=torch.float32)
    image = Image.new("RGB", (72, 72), "white")
    assert isinstance(captioner.generate(**captioner.encode_images([image])).captions[0], str)


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", "[ENC]"]


def make_small_blip(captions, *, hidden_size=96, num_layers=2, image_size=96, seed=0):
    """BLIP-base's architecture in small, with random weights and a WordPiece vocabulary of the captions."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.train_from_iterator(captions, trainers.WordPieceTrainer(vocab_size=30_522, special_tokens=SPECIAL))
    tokenizer = BertTokenizer(vocab=pieces.get_vocab(), do_lower_case=True, model_max_length=512)
    tokenizer.add_special_tokens({"bos_token": "[DEC]", "additional_special_tokens": ["[ENC]"]})
    shared = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "num_hidden_layers": num_layers}
    end = tokenizer.sep_token_id
    config = BlipConfig(
        text_config={
            **shared,
            "num_attention_heads": 12,
            "vocab_size": len(tokenizer),
            "encoder_hidden_size": hidden_size,
            "max_position_embeddings": 512,
            "bos_token_id": tokenizer.convert_tokens_to_ids("[DEC]"),
            "eos_token_id": end,
            "sep_token_id": end,
            "pad_token_id": tokenizer.pad_token_id,
        },
        # A model with BLIP's initializer_range of 1e-10 cannot be trained from scratch.
        vision_config={
            **shared,
            "num_attention_heads": 12,
            "image_size": image_size,
            "patch_size": 16,
            "initializer_range": 0.02,
        },
    )
    torch.manual_seed(seed)
    image_processor = BlipImageProcessor(size={"height": image_size, "width": image_size})
    return BlipForConditionalGeneration(config), BlipProcessor(image_processor, tokenizer)


def write_photos(folder, number=40):
    """Photographs of odd formats, and a few rows that cannot be used."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(number):
        mode, suffix = [("RGB", "jpg"), ("L", "png"), ("RGBA", "png"), ("CMYK", "jpg"), ("P", "gif")][i % 5]
        image = Image.fromarray(rng.integers(0, 255, (30 + i, 50, 3), dtype=np.uint8)).convert(mode)
        image.save(folder / f"{i:03d}.{suffix}")
        rows.append({"file_name": f"{i:03d}.{suffix}", "captions": [f"a picture of thing {i % 7}", "a thing"]})
    rows[3]["captions"] = ["", "   "]
    (folder / rows[7]["file_name"]).write_bytes(b"no image")
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_folder_of_photographs_with_bad_rows(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    write_photos(photos)
    # A captioner of BLIP-base's shape made small, in a folder of this machine whose path must not get into the card.
    captions = [
        c for line in (photos / "metadata.jsonl").read_text().splitlines() for c in json.loads(line)["captions"]
    ]
    model, processor = make_small_blip([c for c in captions if c.strip()], hidden_size=48, image_size=48)
    model.save_pretrained(tmp_path / "small-blip")
    processor.save_pretrained(tmp_path / "small-blip")
    path = recipe.main(
        [
            *("--dataset_name", "imagefolder", "--data_dir", str(photos), "--max_bad_fraction", "0.5"),
            *("--model_name_or_path", str(tmp_path / "small-blip"), "--prompt", "a picture of "),
            *(
                "--scorer_name_or_path",
                "scenes:clip-reward",
                "--held_out_scorer_name_or_path",
                "scenes:siglip-held-out",
            ),
            *("--perplexity_name_or_path", "none", "--compare_mle_weights", "1.0"),
            *("--output_dir", str(tmp_path / "out"), "--learning_rate", "1e-3"),
            *ONE_EPOCH,
        ]
    )
    results = json.loads(path.read_text())
    assert [row["name"] for row in results["rows"]] == ["MLE", "MLE+MLE", "SMILE", "references"]
    smile = results["rows"][2]
    assert smile["hallucination"] is None
    assert "no facts" in smile["hallucination_reason"]
    assert smile["perplexity"] is None
    assert smile["rd100_recall_at_1"] is None  # fewer than 100 images
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "small-blip" in card
    assert str(tmp_path) not in card
    quarantined = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert {"003", "007"} <= {entry["image_id"].split("/")[-1].split(".")[0] for entry in quarantined}


def test_too_many_bad_rows_stop_before_training(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    write_photos(photos, 20)
    with pytest.raises(ValueError, match="max_bad_fraction"):
        recipe.main(
            [
                *("--dataset_name", "imagefolder", "--data_dir", str(photos), "--output_dir", str(tmp_path / "out")),
                *("--model_name_or_path", "scenes:blip-mle", "--scorer_name_or_path", "none"),
                *("--held_out_scorer_name_or_path", "none", "--perplexity_name_or_path", "none"),
            ]
        )
    assert (tmp_path / "out" / "quarantine.jsonl").exists()


def test_the_command_line_overrides_the_file():
    *_, config = recipe.parse_args(
        ["--config", str(RECIPES / "configs/smile_blip/coco.yaml"), "--learning_rate", "3e-6"]
    )
    assert config.learning_rate == 3e-6
    assert config.num_train_epochs == 5
    assert config.prompt == "a picture of "


def test_the_embedded_settings_do_not_apply_to_other_models():
    *_, config = recipe.parse_args(["--model_name_or_path", "Salesforce/blip-image-captioning-base"])
    assert config.learning_rate == 1e-5
    assert not config.cache_image_features


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"mle_weight": 1.0}, "MLE+MLE"),
        ({}, "SMILE"),
        ({"mle_weight": 0.05}, "SMILE (lambda=0.05)"),
        ({"subset": "reverse"}, "SMILE (reverse subset)"),
        ({"first_token": "shift"}, "SMILE (first token: shift)"),
    ],
)
def test_row_names(tmp_path, settings, name):
    from hf_captionrl.trainers import SmileConfig

    assert recipe.run_name(SmileConfig(str(tmp_path), **settings)) == name


def test_unknown_arguments_in_a_file_are_named(tmp_path):
    (tmp_path / "bad.yaml").write_text("learning_rat: 1.0\n")
    with pytest.raises(ValueError, match="learning_rat"):
        recipe.parse_args(["--config", str(tmp_path / "bad.yaml")])


def test_a_row_without_further_training(tmp_path):
    path = recipe.main(
        [
            *("--output_dir", str(tmp_path / "out"), "--feature_cache_dir", str(tmp_path / "cache")),
            *("--max_train_images", "8", "--max_eval_images", "8", "--max_test_images", "12"),
            *ONE_EPOCH,
            *("--num_train_epochs", "0"),
        ]
    )
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["MLE", "references"]
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert "maximum likelihood" in (tmp_path / "out" / "model" / "README.md").read_text().lower()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model-name-or-path", "Salesforce/blip-image-captioning-base"],
        ["--data_dir", "photos"],
        [f"--config={RECIPES / 'configs/smile_blip/coco.yaml'}"],
    ],
)
def test_real_data_and_model_get_the_settings_of_the_paper(arguments):
    *_, config = recipe.parse_args(arguments)
    assert config.learning_rate == 1e-5
    assert not config.freeze_vision_tower


def test_the_embedded_data_named_by_hand_keep_their_settings():
    *_, config = recipe.parse_args(["--seed", "3"])
    assert config.learning_rate == 2e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data_dir", "photos"], "Set --dataset_name imagefolder"),
        (["--resume_from_checkpoint", "model/checkpoint-40"], "Use 'true'"),
        (["--push_to_hub", "--held_out_scorer_name_or_path", "none"], "needs a held-out scorer"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        recipe.main(["--output_dir", str(tmp_path), "--use_cpu", *arguments])
