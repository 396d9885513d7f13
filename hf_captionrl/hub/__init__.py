"""Publishing: cards, manifest, push.

Cards and folders are checked before anything is uploaded, and a failed push can be repeated.
"""

from hf_captionrl.hub.dataset_card import DatasetCardFacts, render_dataset_card, write_dataset_card
from hf_captionrl.hub.manifest import MANIFEST_FILE, public_command, public_values, write_manifest
from hf_captionrl.hub.metric_card import push_metric, render_metric_card, write_space
from hf_captionrl.hub.model_card import (
    ModelCardFacts,
    eval_results_yaml,
    read_facts,
    render_model_card,
    write_model_card,
)
from hf_captionrl.hub.publish_checks import check_card
from hf_captionrl.hub.publishable_files import Contents, folder_contents, local_base_model
from hf_captionrl.hub.push import STATE_FILE, pin_examples, push_folder, read_push_state
from hf_captionrl.hub.push_errors import PushError
from hf_captionrl.hub.unmeasured_cards import push_captioner, push_trained, write_trained_card, write_unmeasured_card

__all__ = [
    "MANIFEST_FILE",
    "STATE_FILE",
    "Contents",
    "DatasetCardFacts",
    "ModelCardFacts",
    "PushError",
    "check_card",
    "eval_results_yaml",
    "folder_contents",
    "local_base_model",
    "pin_examples",
    "public_command",
    "public_values",
    "push_captioner",
    "push_folder",
    "push_metric",
    "push_trained",
    "read_facts",
    "read_push_state",
    "render_dataset_card",
    "render_metric_card",
    "render_model_card",
    "write_dataset_card",
    "write_manifest",
    "write_model_card",
    "write_space",
    "write_trained_card",
    "write_unmeasured_card",
]
