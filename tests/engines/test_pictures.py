"""Pictures in prompts: packed rows and drawn tokens are those of the model's own forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rlflow.batch import (
    flat,
    lengths,
    make_batch,
    ragged_rows,
    shared_rows,
    split_rows,
)
from rlflow.contract.values import SampleKey, Sampling
from rlflow.data.pictures.columns import encoded_pictures
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.pictures.passes import forward_inputs, picture_tokens
from rlflow.engines.hf.pictures.reader import picture_reader
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine
from rlflow.engines.hf.weights.in_files import FileNames
from rlflow.errors import UsageError
from rlflow.graph.fields import PICTURES, PIXELS
from rlflow.graph.model import LoRA
from rlflow.modelfiles.pictures.towers import TOWERS, is_tower, model_part
from rlflow.ops.bodies.rows.pictures import joined_pictures
from rlflow.runtime.record.shards import exporting
from rlflow.scheduler.models.shapes import read_shape
from tests.conftest import TINY
from tests.engines import sharded_checks as checks
from tests.engines.examples import Spec
from tests.engines.seeing import GRID, KINDS, PART, SQUARE, picture, write_seeing

pytestmark = pytest.mark.torch
held = checks.held

# The second prompt is the first one's text with another picture; the last one has none.
SEEN = ([(20, 12, 1)], [(20, 12, 2)], [(9, 30, 3), (16, 16, 4)], [])
RESPONSES = [[10, 11, 12], [10, 11], [10, 11, 14, 2, 15], [9], [7, 2], [20, 21, 22, 23]]
OF_PROMPT = [0, 0, 1, 2, 2, 3]


def seen_prompts(path):
    """Prompts as ragged tokens, and their pictures."""
    from rlflow.engines.hf.loading import load_tokenizer

    reader, tokenizer = picture_reader(path), load_tokenizer(path)
    found, rows = [], []
    for sizes in SEEN:
        read = reader.read([picture(*size) for size in sizes])
        found.append(read)
        marks = "ab".join(read.texts)
        rows.append(tokenizer([f"look {marks} ok"], add_special_tokens=False)["input_ids"][0])
    encoded = [encoded_pictures([picture(*size) for size in sizes]) for sizes in SEEN]
    field = ragged_rows([list(each) for each in encoded], torch.uint8)
    return ragged_rows(rows, torch.int64), joined_pictures(found, field)


def sampled(path):
    """Rows of several samples of the prompts, as a rollout makes them."""
    prompts, pictures = seen_prompts(path)
    parent = torch.tensor(OF_PROMPT)
    tokens = split_rows(prompts)
    return make_batch(
        {
            "prompt_tokens": ragged_rows([tokens[row].tolist() for row in OF_PROMPT], torch.int64),
            "response_tokens": ragged_rows(RESPONSES, torch.int64),
            PIXELS: shared_rows(pictures.pixels, parent),
            PICTURES: shared_rows(pictures.shapes, parent),
        },
        len(RESPONSES),
    )


def own_logits(plain, model, tokens, pixels, shapes):
    """The logits that transformers computes of one unpacked row."""
    if not len(shapes):
        return plain(input_ids=tokens[None]).logits[0]
    inputs = forward_inputs(model.sight, pixels, shapes)
    types = (tokens == PART).long()
    # Tokens that were drawn stand for no picture, whatever their number.
    types[int((types.cumsum(0) <= len(pixels)).sum()) :] = 0
    name = "token_type_ids" if model.sight.sees == "soft" else "mm_token_type_ids"
    more = {name: types[None]} if model.sight.sees in ("soft", "grid") else {}
    return plain(input_ids=tokens[None], **inputs, **more).logits[0]


def own_log_probs(path, model, batch, plain=None):
    """Log-probs of the responses, each row by itself, by transformers."""
    plain = plain or transformers.AutoModelForImageTextToText.from_pretrained(path).eval()
    fields = ("prompt_tokens", "response_tokens", PIXELS, PICTURES)
    rows = zip(*(split_rows_of(batch[name]) for name in fields), strict=True)
    found = []
    for prompt, response, pixels, shapes in rows:
        drawn = torch.where(response == PART, 8, response)
        logits = own_logits(plain, model, torch.cat([prompt, drawn]), pixels, shapes)
        scores = logits[len(prompt) - 1 : -1].log_softmax(-1)
        found.append(scores.gather(1, drawn[:, None])[:, 0])
    return torch.cat(found)


def split_rows_of(field):
    return torch.split(flat(field), lengths(field).tolist())


@pytest.fixture(scope="module", params=KINDS)
def seeing(request, tmp_path_factory):
    return write_seeing(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.rows(5)
@pytest.mark.parametrize("micro_tokens", [None, 40])
def test_packed_log_probs_are_the_models_own(seeing, micro_tokens):
    model = load_model(seeing, dtype=torch.float32, device="cpu")
    batch = sampled(seeing)
    batch["response_tokens"] = ragged_rows(
        [[8 if token == PART else token for token in row] for row in RESPONSES], torch.int64
    )
    train = TrainEngine(model, None, micro_tokens=micro_tokens)
    made = train.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"]

    first, other = made[:2], made[5:7]
    assert not torch.allclose(first, other, atol=1e-3), "two pictures of one text are read alike"
    with torch.no_grad():
        torch.testing.assert_close(made, own_log_probs(seeing, model, batch), atol=2e-5, rtol=0)


def greedy(path, paged, monkeypatch=None):
    """What a rollout draws without chance, and its log-probs."""
    model = load_model(path, dtype=torch.float32, device="cpu")
    prompts, pictures = seen_prompts(path)
    rollout = TorchRollout(model, paged=paged)
    sampling = Sampling(max_new_tokens=9, temperature=0.0, n=2)
    key = SampleKey(seed=0, iteration=0, stream="rollout")
    made = rollout.generate(
        prompts, sampling, key, torch.arange(2 * len(prompts)), pictures=pictures
    )
    return model, prompts, pictures, made


@pytest.mark.rows(5)
@pytest.mark.parametrize("paged", [False, True])
def test_greedy_tokens_are_the_models_own(seeing, paged):
    """A token is the likeliest after its prompt, pictures and tokens in the model's own forward."""
    model, prompts, pictures, made = greedy(seeing, paged)
    plain = transformers.AutoModelForImageTextToText.from_pretrained(seeing).eval()
    rows = zip(
        *map(split_rows_of, (prompts, pictures.pixels, pictures.shapes)),
        split_rows_of(made.response_tokens)[::2],
        split_rows_of(made.log_probs)[::2],
        strict=True,
    )
    for prompt, pixels, shapes, drawn, log_probs in rows:
        stop = drawn.tolist().index(PART) if PART in drawn.tolist() else len(drawn)
        tokens = drawn[:stop]
        with torch.no_grad():
            logits = own_logits(plain, model, torch.cat([prompt, tokens]), pixels, shapes)
        scores = logits[len(prompt) - 1 : -1].log_softmax(-1)
        own = scores.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(own, log_probs[: len(own)], atol=2e-5, rtol=0)
        torch.testing.assert_close(own, scores.max(-1).values, atol=2e-5, rtol=0)


def test_a_rollouts_log_probs_are_those_of_training(seeing):
    model = load_model(seeing, dtype=torch.float32, device="cpu")
    prompts, pictures = seen_prompts(seeing)
    sampling = Sampling(max_new_tokens=7, temperature=1.0, n=3)
    key = SampleKey(seed=0, iteration=0, stream="rollout")
    count = 3 * len(SEEN)
    made = TorchRollout(model).generate(
        prompts, sampling, key, torch.arange(count), pictures=pictures
    )
    parent = torch.arange(len(SEEN)).repeat_interleave(3)
    batch = make_batch(
        {
            "prompt_tokens": shared_rows(prompts, parent),
            "response_tokens": made.response_tokens,
            PIXELS: shared_rows(pictures.pixels, parent),
            PICTURES: shared_rows(pictures.shapes, parent),
        },
        count,
    )
    train = TrainEngine(model, None, micro_tokens=60)
    again = train.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"]

    torch.testing.assert_close(again, flat(made.log_probs), atol=2e-5, rtol=0)


@pytest.mark.rows(3)
def test_gradients_are_those_of_the_models_own_forward(seeing):
    """Of the tower too; a micro-batch each of rows with one picture, several and none."""
    model = load_model(seeing, dtype=torch.float32, device="cpu")
    batch = sampled(seeing)
    batch["response_tokens"] = ragged_rows(
        [[8 if token == PART else token for token in row] for row in RESPONSES], torch.int64
    )
    train = TrainEngine(model, Spec(), micro_tokens=40)
    real, found = train.optimizer.step, {}
    train.optimizer.step = lambda scale: found.update(held(train))
    loss = lambda outputs, micro: (-outputs["log_probs"].sum(), {})  # noqa: E731
    train.step(batch, loss, outputs=("log_probs",), temperature=1.0, max_grad_norm=None)
    train.optimizer.step = real
    plain = transformers.AutoModelForImageTextToText.from_pretrained(seeing).eval()
    (-own_log_probs(seeing, model, batch, plain).sum()).backward()

    assert any(is_tower(name) and bool(g.abs().max() > 1e-3) for name, g in found.items())
    for name, parameter in plain.named_parameters():
        if name in found:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name], own, atol=3e-4, rtol=2e-3, msg=name)


def gradients(model):
    """The gradients of a step on the rows, by name, and whether outputs of modules have any."""
    batch, asked = sampled(model.name), {}
    for name, module in model.module.named_modules():
        if model_part(f"{name}.weight") == "vision":
            module.register_forward_hook(
                lambda _, __, out, n=name: asked.update(
                    {n: any(t.requires_grad for t in tree_leaves(out) if torch.is_tensor(t))}
                )
            )
    train = TrainEngine(model, Spec(), micro_tokens=40)
    found = {}
    train.optimizer.step = lambda scale: found.update(held(train))
    loss = lambda outputs, micro: (-outputs["log_probs"].sum(), {})  # noqa: E731
    train.step(batch, loss, outputs=("log_probs",), temperature=1.0, max_grad_norm=None)
    return found, asked


@pytest.mark.rows(3)
def test_no_backward_passes_a_frozen_tower(seeing):
    """The projector's gradients and the language model's are those with a trained tower."""
    how = {"dtype": torch.float32, "device": "cpu"}
    whole, asked = gradients(load_model(seeing, **how))
    assert any(asked.values())
    frozen, asked = gradients(load_model(seeing, **how, freeze=("vision",)))
    # Below Qwen's `visual` lies the projector, whose output is that of all.
    inner = {name: asks for name, asks in asked.items() if not name.endswith("visual")}
    assert inner
    assert not any(inner.values())
    assert {model_part(name) for name in frozen} == {"language", "projector"}
    assert {model_part(name) for name in whole.keys() - frozen.keys()} == {"vision"}
    for name, gradient in frozen.items():
        assert torch.equal(gradient, whole[name]), name


def test_a_part_that_is_not_there_is_not_frozen():
    with pytest.raises(UsageError, match=r"(?s)E555.*a model with a part for text alone"):
        load_model(str(TINY), dtype=torch.float32, device="cpu", freeze=("vision",))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((1, 2, 1), {}),
        # A rank has no row, and so a blank picture.
        ((1, 2, 1), {"uneven": True}),
        ((1, 2, 1), {"uneven": True, "freeze": ("vision",)}),
        ((1, 1, 2), {"freeze": ("vision",)}),
        # Rows so few at a time that some have no picture.
        ((1, 1, 2), {"sequence": True, "micro_tokens": 12}),
        ((1, 2, 1, 1, 2), {"freeze": ("vision",)}),
        ((1, 2, 1, 1, 2), {}),
    ],
    ids=str,
)
def test_two_ranks_compute_what_one_does(kind, shape, how, world, tmp_path):
    """With shards of the tower along `fsdp`, and all of it on each rank along `tp`.

    Along `cp` a rank sees the pictures that have tokens there, some of which lie on both.
    """
    path = write_seeing(tmp_path, kind)
    options = {"micro_tokens": 40, **how}
    assert all(world(2).run(checks.with_pictures, path, shape, options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_pictures_are_seen_round_a_ring(kind, world, tmp_path):
    path = write_seeing(tmp_path, kind)
    options = {"micro_tokens": 40, "cp_by": "ring"}
    assert all(world(2).run(checks.with_pictures, path, (1, 2, 1, 1, 2), options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{}, {"freeze": ("vision",)}, {"head": "value"}], ids=str)
def test_stages_compute_what_one_rank_does(kind, how, world, tmp_path):
    """The first of two has the tower; positions and what sees both ways reach the other one.

    Of Qwen3-VL it has the two layers that the tower adds to.
    """
    path = write_seeing(tmp_path, kind, layers=2 + (kind == "qwen3_vl"))
    options = {"micro_tokens": 40, "pp": 2, **how}
    assert all(world(2).run(checks.with_pictures, path, (1, 1, 1), options))


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((1, 2, 1), {"head": "value"}),
        ((1, 1, 2), {"sequence": True}),
        ((1, 2, 1, 1, 2), {}),
        ((1, 1, 1), {"stages": (2, 1, 1, 1)}),
        ((1, 1, 1), {"schedule": "zero-bubble"}),
    ],
    ids=str,
)
def test_stages_with_layers_that_a_tower_adds_to_are_shared_out(shape, how, world, tmp_path):
    path = write_seeing(tmp_path, "qwen3_vl", layers=5)
    options = {"micro_tokens": 40, "pp": 2, **how}
    assert all(world(2 * shape[1] * shape[2]).run(checks.with_pictures, path, shape, options))


@pytest.mark.slow
@pytest.mark.extra
def test_pictures_are_seen_where_layers_and_tokens_are_shared(world, tmp_path):
    """With the sequence shared along `tp`, and what several layers of a tower add in between."""
    path = write_seeing(tmp_path, "qwen3_vl")
    options = {"micro_tokens": 40, "sequence": True}
    assert all(world(4).run(checks.with_pictures, path, (1, 2, 2, 1, 2), options))


def turn_experts(path):
    """Have the files hold experts as those that are published do."""
    file = Path(path) / "model.safetensors"
    held = load_file(file)
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        if "experts" in name:
            held[name] = held[name].transpose(-1, -2).contiguous()
    save_file(held, file, {"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((1, 2, 1), {}),
        ((1, 2, 1), {"head": "value"}),
        ((1, 2, 1, 2), {"uneven": True}),
        ((1, 1, 1), {"pp": 2}),
        ((1, 1, 2), {}),
        ((1, 2, 1, 1, 2), {}),
    ],
    ids=str,
)
def test_a_mixture_that_sees_computes_what_one_rank_does(shape, how, world, tmp_path):
    """From files with experts as they are published, and as transformers writes them."""
    path = write_seeing(tmp_path, "qwen3_vl_moe", layers=3)
    if shape != (1, 1, 1):
        turn_experts(path)
    options = {"micro_tokens": 40, **how}
    assert all(world(2).run(checks.with_pictures, path, shape, options))


@pytest.mark.slow
def test_experts_that_are_turned_around_in_files_are_read_as_they_are(tmp_path):
    """Where an export reads them of a model with adapters; engines are told none of their names."""
    path = write_seeing(tmp_path, "qwen3_vl_moe", layers=3)
    plain = load_file(tmp_path / "model.safetensors")
    turn_experts(path)
    lora = {"alpha": 1, "rank": 1}
    spec = {"dtype": "float32", "head": "lm", "init": "pretrained", "lora": lora}
    module = exporting._skeleton(path, spec)
    _, parts = exporting._form(module)
    read = exporting._reader(module, path, spec, {})
    assert parts.keys() == plain.keys()
    assert all(torch.equal(read(name, part), plain[name]) for name, part in parts.items())
    with pytest.raises(UsageError, match="E591"):
        FileNames.of(module, path)


def test_adapters_are_on_the_language_model_alone(tmp_path):
    """Gemma 3's tower has layers of the same names; without adapters it is not trained."""
    path = write_seeing(tmp_path, "gemma3")
    model = load_model(path, dtype=torch.float32, device="cpu", lora=LoRA(targets=("q_proj",)))
    linear = [name for name, _ in model.module.named_modules() if name.endswith(".q_proj")]

    assert any(is_tower(name) for name in linear)
    assert model.trained_names()
    assert {True} == {"language_model" in name for name in model.trained_names()}


def passed_tower(path, dtype, by):
    """Of a forward of the rows: bytes that layers of the tower leave, operations of the tower.

    Attention goes `by` a kernel; those of products alone are counted.
    """
    model = load_model(path, dtype=dtype, device="cpu")
    known = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    depth, counted, kept = [0], [0], {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if depth[0] and storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    for name, module in model.module.named_modules():
        layer = name.split(".")[-2:-1] in (["layers"], ["layer"], ["blocks"])
        if layer and model_part(f"{name}.weight") == "vision":
            module.register_forward_pre_hook(lambda *_: depth.__setitem__(0, 1))
            module.register_forward_hook(lambda *_: depth.__setitem__(0, 0))
    tops = [m for name, m in model.module.named_modules() if name.split(".")[-1] in TOWERS]
    for module in tops:
        plain = module.forward

        def counting(*args, plain=plain, **how):
            with sdpa_kernel(by), FlopCounterMode(display=False) as counter:
                made = plain(*args, **how)
            counted[0] += counter.get_total_flops()
            return made

        module.forward = counting
    train = TrainEngine(model, Spec(), micro_tokens=None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train.compute(sampled(path), ("log_probs",), 1.0)
    return sum(storage.nbytes() for storage in kept.values()), counted[0]


@pytest.mark.rows(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_knows_what_a_tower_computes_and_leaves(kind, tmp_path, monkeypatch):
    """Beside what norms and sums of attention keep of each patch, and positions of all layers."""
    for sizes in (GRID, SQUARE):
        monkeypatch.setitem(sizes, "hidden_size", 64)
        monkeypatch.setitem(sizes, "intermediate_size", 96)
    monkeypatch.setitem(SQUARE, "num_attention_heads", 8)
    path = write_seeing(tmp_path, kind)
    eyes, (_, pictures) = read_shape(Path(path)).eyes, seen_prompts(path)
    sight = load_model(path, dtype=torch.float32, device="cpu").sight
    each = picture_tokens(sight, flat(pictures.shapes)).tolist()
    tokens = sum(each)
    for dtype in (torch.float32, torch.bfloat16):
        kept, _ = passed_tower(path, dtype, SDPBackend.FLASH_ATTENTION)
        planned = eyes.layers * eyes.layer_bytes(dtype.itemsize) * tokens * eyes.patches
        planned += eyes.mask_bytes(tokens, dtype.itemsize)
        assert 0.9 < planned / kept <= 1, (dtype, planned, kept)
    _, operations = passed_tower(path, torch.bfloat16, SDPBackend.MATH)
    squares = tokens**2 if eyes.joined else sum(n**2 for n in each)
    assert 0.95 <= sum(eyes.forward(tokens, squares)) / operations < 1.05
