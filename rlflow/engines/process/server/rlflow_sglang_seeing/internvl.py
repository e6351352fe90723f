"""InternVL as transformers' files have it, of what SGLang has for InternS1.

Both are one architecture; of InternVL alone SGLang knows the files that its authors first published
(`internvl_chat`). What a config leaves out is what nothing sees: how weights are drawn and dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from sglang.srt.managers.mm_utils import pad_mm_tokens
from sglang.srt.models.interns1 import InternS1ForConditionalGeneration

LANGUAGE_MODELS = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
HEAD = "language_model.lm_head."
FRONTS = {"language_model.model.": "model.language_model.", HEAD: "lm_head."}
SEEING = ("vision_tower.", "multi_modal_projector.")


class InternVLForConditionalGeneration(InternS1ForConditionalGeneration):  # type: ignore[misc]
    """A tower of tiles, its projector and a language model of Qwen2 or Qwen3."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        del prefix
        tower, text = config.vision_config, config.text_config
        tower.dropout = tower.drop_path_rate = 0.0
        tower.initializer_factor = tower.layer_scale_init_value
        text.architectures = [LANGUAGE_MODELS[text.model_type]]
        super().__init__(config, quant_config)

    def pad_input_ids(self, input_ids: array[int], mm_inputs: Any) -> array[int]:
        """Tokens, those of pictures by what they show: so a cache tells pictures apart.

        They are found by where they are, and not by marks around them, which text may have too.
        """
        padded: array[int] = pad_mm_tokens(input_ids, mm_inputs)
        return padded

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load weights by their names in files, with `model.` in front of them or without."""
        super().load_weights(_named(weights))


def _named(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, weight in weights:
        front = next((each for each in FRONTS if name.startswith(each)), None)
        if front is not None:
            yield FRONTS[front] + name.removeprefix(front), weight
        else:
            yield f"model.{name}" if name.startswith(SEEING) else name, weight


EntryClass = InternVLForConditionalGeneration
