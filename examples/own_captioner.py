"""A model family of your own: a small vision tower and GPT-2 with cross-attention, which the package does not know.

    python examples/own_captioner.py

A family is a subclass of `Captioner` that states what differs. Everything else then works: SMILE, rewards, LoRA, cached features,
`captionrl caption`. Chat models that `AutoModelForImageTextToText` loads need no family, see docs/families.md.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedConfig, PreTrainedModel, ViTConfig, ViTModel
from transformers.modeling_outputs import CausalLMOutput

from hf_captionrl import SmileConfig, SmileTrainer, load_captioner, load_scenes
from hf_captionrl.captioners import Captioner, register

# --- The model: any PreTrainedModel with a vision tower and an output head ---------------------------------------------


class LookAndTellConfig(PreTrainedConfig):
    model_type = "look-and-tell"

    def __init__(self, vocab_size=64, width=32, image_size=72, start=5, end=3, pad=0, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.width, self.image_size = vocab_size, width, image_size
        self.bos_token_id, self.eos_token_id, self.pad_token_id = start, end, pad


class LookAndTell(PreTrainedModel):
    config_class = LookAndTellConfig

    def __init__(self, config):
        super().__init__(config)
        size = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": config.width}
        self.eye = ViTModel(ViTConfig(image_size=config.image_size, patch_size=24, **size), add_pooling_layer=False)
        text = {"n_layer": 2, "n_head": 2, "n_embd": config.width, "vocab_size": config.vocab_size, "n_positions": 64}
        ends = {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
        }
        self.mouth = GPT2LMHeadModel(GPT2Config(add_cross_attention=True, **text, **ends))
        self.post_init()

    def get_output_embeddings(self):
        return self.mouth.get_output_embeddings()

    def forward(self, pixel_values, input_ids, attention_mask=None, labels=None, **kwargs):
        seen = self.eye(pixel_values).last_hidden_state  # (B, M, D)
        output = self.mouth(input_ids, attention_mask=attention_mask, encoder_hidden_states=seen, labels=labels)
        return CausalLMOutput(loss=output.loss, logits=output.logits)  # (), (B, T, V)


# --- The family --------------------------------------------------------------------------------------------------------


@register
class LookAndTellCaptioner(Captioner):
    """Which model types it is for, where its vision tower is, and which module writes."""

    family = "look-and-tell"
    model_types = ("look-and-tell",)
    vision_path = "eye"
    language_lora = r"mouth\..*\.(c_attn|q_attn)"
    vision_lora = r"eye\..*\.(query|value)"

    @property
    def writer(self):
        return self.base_model.mouth

    def generate_ids(self, image_features, prompt_ids, side_inputs, **kwargs):
        """Ids `(N, T)` after the prompt `(B, P)`, by `generate` of the module that writes."""
        mask = torch.ones_like(prompt_ids)
        ids = self.writer.generate(prompt_ids, attention_mask=mask, encoder_hidden_states=image_features, **kwargs)
        return ids[:, prompt_ids.size(1) :]


if __name__ == "__main__":
    torch.manual_seed(0)
    data = load_scenes(num_train=64, num_validation=0, num_test=0)["train"]
    processor = load_captioner("scenes:blip-mle").processor  # of your model: AutoProcessor.from_pretrained(...)
    model = LookAndTell(LookAndTellConfig(vocab_size=len(processor.tokenizer)))
    captioner = load_captioner(model, processor=processor)

    # The head tap gives the loss that the model computes itself: the first thing to check of a new family.
    batch = captioner.collate(data["image"][:4], [captions[0] for captions in data["captions"][:4]])
    print(f"the tapped head and the model's loss differ by {captioner.self_check(batch):.1e}")

    args = SmileConfig("outputs/own_captioner", mle_weight=1.0, max_steps=30, learning_rate=1e-2, report_to="none")
    args.disable_tqdm, args.save_strategy, args.logging_steps = True, "no", 10
    trainer = SmileTrainer(captioner, args, data)
    trainer.train()
    print("loss:", *(f"{log['loss']:.2f}" for log in trainer.state.log_history if "loss" in log))
    print("captions:", captioner.generate(**captioner.encode_images(data["image"][:2]), max_new_tokens=12).captions)
