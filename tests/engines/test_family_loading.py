"""The table of families says of each what loading does: whole, over fsdp ranks, cut by tp."""

from __future__ import annotations

import pytest
import torch
import transformers

from rlflow.engines.hf.loading import load_model
from rlflow.modelfiles.families import FAMILIES
from tests.engines import sharded_families as sharded
from tests.scheduler.test_families import CONFIGS, DENSE_REFUSED, LAYOUTS, REFUSED, SMALL

pytestmark = pytest.mark.torch


@pytest.fixture
def saved(tmp_path):
    def save(family):
        special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        options = {**SMALL, **CONFIGS[family], **special, "initializer_range": 0.2}
        config = transformers.CONFIG_MAPPING[family](**options)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def test_every_family_tested_is_one_of_the_table():
    assert FAMILIES.keys() >= CONFIGS.keys()
    assert CONFIGS.keys() >= REFUSED.keys()


def test_every_language_model_of_transformers_is_in_the_table():
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert not names.keys() - FAMILIES.keys()


@pytest.mark.rows(4)
@pytest.mark.parametrize("family", CONFIGS)
def test_loading_refuses_what_the_plan_refuses(family, saved, world):
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    path, codes = saved(family), REFUSED.get(family, DENSE_REFUSED)

    assert codes[0] == sharded.refused(lambda: load_model(path, dtype=torch.float32, device="cpu"))
    for code, layout in zip(codes[1:], list(LAYOUTS)[1:], strict=True):
        assert [code] * 2 == world(2).run(sharded.refusal, path, layout)
