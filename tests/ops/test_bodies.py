"""The bodies with small models made for the test: rows, groups, counts and refusals."""

from __future__ import annotations

import math
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import rlflow as rf
from rlflow.batch import flat, lengths, make_batch, ragged_rows, split_rows, strings, text
from rlflow.engines.hf.loading import load_tokenizer
from rlflow.errors import DataError, NumericsError, RewardError, RunError
from rlflow.graph.fields import Field
from rlflow.ops.bodies import advantage, common, data, forward, metrics, reward, rollout, update
from rlflow.ops.bodies.user import call as user
from rlflow.runtime.execute.stats import join_metrics
from tests.budget import examples
from tests.conftest import TINY
from tests.ops.calls import call_of, generated

pytestmark = pytest.mark.torch


def tokens(sizes):
    return ragged_rows([list(range(3, 3 + size)) for size in sizes], torch.int64)


def mask(sizes):
    return ragged_rows([[True] * size for size in sizes], torch.bool)


# --- update ---------------------------------------------------------------------------------


def batch_of(groups):
    sizes = [1 + row % 3 for row in range(len(groups))]
    fields = {
        "response_tokens": tokens(sizes),
        "response_mask": mask(sizes),
        "row": torch.arange(len(groups)),
        "group": torch.tensor(groups),
    }
    return make_batch(fields, len(groups))


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=24), st.integers(1, 4), st.integers(1, 5))
def test_mini_batches_keep_groups_whole_and_cover_all_rows_once_an_epoch(groups, epochs, parts):
    call = call_of(params={"epochs": epochs, "mini_batches": parts})
    minis = list(update.cut_mini_batches(call, batch_of(groups)))
    most = min(parts, len(set(groups)))
    assert epochs <= len(minis) <= epochs * most
    each = len(minis) // epochs
    for epoch in range(epochs):
        rows, seen = [], []
        for mini in minis[epoch * each : (epoch + 1) * each]:
            rows += mini["row"].tolist()
            seen += sorted(set(mini["group"].tolist()))
            for group in set(mini["group"].tolist()):
                assert groups.count(group) == mini["group"].tolist().count(group)
        assert list(range(len(groups))) == sorted(rows)
        assert len(seen) == len(set(seen))


def test_each_epoch_has_an_order_of_its_own_and_it_repeats():
    call = call_of(params={"epochs": 4, "mini_batches": 8})
    first = [mini["row"].tolist() for mini in update.cut_mini_batches(call, batch_of(range(16)))]
    again = [mini["row"].tolist() for mini in update.cut_mini_batches(call, batch_of(range(16)))]
    assert first == again
    orders = {str(first[epoch * 8 : epoch * 8 + 8]) for epoch in range(4)}
    assert 4 == len(orders)


def test_without_groups_a_row_is_its_own_group():
    batch = batch_of([0] * 6).exclude("group")
    call = call_of(inputs=batch, params={"epochs": 1, "mini_batches": 3})
    assert [2, 2, 2] == [len(mini["row"]) for mini in update.cut_mini_batches(call, batch)]


def step(applied=True, grad_norm=1.0, **numbers):
    return SimpleNamespace(metrics=numbers, grad_norm=grad_norm, applied=applied)


def test_step_metrics_are_means_and_maxima_of_the_applied_steps():
    steps = [
        step(loss=1.0, ratio_max=3.0, grad_norm=2.0),
        step(loss=3.0, ratio_max=2.0, grad_norm=4.0),
        step(applied=False, loss=math.nan, ratio_max=math.inf, grad_norm=math.inf),
    ]
    expected = {"loss": 2.0, "ratio_max": 3.0, "grad_norm": 3.0, "skipped": 1.0}
    assert expected == update.step_metrics(steps)


class Stepper:
    """A model whose steps are what a test says; it notes the rows of each."""

    learning_rate = 0.5

    def __init__(self, *applied):
        self.applied = list(applied)
        self.rows = []

    def step(self, mini, loss, *, outputs, temperature, max_grad_norm):
        self.rows.append(len(mini["row"]))
        return step(applied=self.applied.pop(0), loss=1.0)


def update_call(model, **changed):
    params = {"loss": rf.SFTLoss(), "epochs": 2, "mini_batches": 2, "max_grad_norm": 1.0}
    return call_of(inputs=batch_of([0, 0, 1, 1]), params=params | changed, model=model)


def test_update_makes_epochs_times_mini_batches_steps():
    model = Stepper(True, True, False, True)
    made = update.update(update_call(model))
    assert [2, 2, 2, 2] == model.rows
    assert {"loss": 1.0, "grad_norm": 1.0, "skipped": 1.0, "lr": 0.5} == made.metrics


def test_an_update_without_a_finite_step_is_an_error():
    with pytest.raises(NumericsError) as caught:
        update.update(update_call(Stepper(False, False, False, False)))
    assert "made: no optimizer step of iteration 0 was finite" in str(caught.value)


# --- rewards and metrics --------------------------------------------------------------------


def reward_call(function, rows=("a", "bb", "ccc"), batched=False, **options):
    inputs = make_batch({"response": text(rows)}, len(rows))
    params = {"function": function, "batched": batched, **options}
    return call_of(inputs=inputs, params=params, iteration=4)


def test_a_reward_per_sample_and_per_batch():
    one = reward.reward(reward_call(lambda response: len(response)))
    whole = reward.reward(reward_call(lambda response: [len(r) for r in response], batched=True))
    assert [1.0, 2.0, 3.0] == one.fields["reward"].tolist() == whole.fields["reward"].tolist()
    assert torch.float32 == one.fields["reward"].dtype
    expected = {"mean": 2.0, "std": pytest.approx((2 / 3) ** 0.5), "min": 1.0, "max": 3.0}
    assert expected == join_metrics([one.metrics])


def test_options_reach_the_reward_function():
    made = reward.reward(reward_call(lambda response, scale: len(response) * scale, scale=2.0))
    assert [2.0, 4.0, 6.0] == made.fields["reward"].tolist()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "returned nan"),
        (-math.inf, "returned -inf"),
        (None, "returned None"),
        ("1.0", "returned '1.0'"),
        ([1.0, 2.0], "returned [1.0, 2.0]: TypeError: float() argument"),
    ],
)
def test_what_is_no_reward_names_the_sample(value, problem):
    function = lambda response: value if response == "bb" else 1.0  # noqa: E731
    with pytest.raises(RewardError) as caught:
        reward.reward(reward_call(function))
    assert f"on sample 1 of iteration 4: {problem}" in str(caught.value)
    assert "response: 'bb'" in str(caught.value)
    batched = lambda response: [function(one) for one in response]  # noqa: E731
    with pytest.raises(RewardError) as caught:
        reward.reward(reward_call(batched, batched=True))
    assert f"on sample 1 of iteration 4: {problem}" in str(caught.value)


def test_a_reward_that_raises_keeps_its_cause():
    with pytest.raises(RewardError) as caught:
        reward.reward(reward_call(lambda response: {}[response]))
    assert isinstance(caught.value.__cause__, KeyError)
    assert "on sample 0 of iteration 4: KeyError: 'a'" in str(caught.value)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_batch_reward_of_the_wrong_length(count):
    with pytest.raises(RewardError) as caught:
        reward.reward(reward_call(lambda response: [1.0] * count, batched=True))
    assert f"{count} rewards for 3 samples" in str(caught.value)


def test_tensors_and_bools_are_rewards():
    made = reward.reward(reward_call(lambda response: torch.tensor(0.5)))
    assert [0.5] * 3 == made.fields["reward"].tolist()
    made = reward.reward(reward_call(lambda response: response == "bb"))
    assert [0.0, 1.0, 0.0] == made.fields["reward"].tolist()


def test_rows_of_a_field():
    assert ["é", ""] == reward.python_rows(text(["é", ""]))
    assert [[3], [3, 4]] == reward.python_rows(tokens([1, 2]))
    assert [1.5, 2.5] == reward.python_rows(torch.tensor([1.5, 2.5]))


def test_metrics_of_fields_and_of_a_function():
    inputs = make_batch({"a": torch.tensor([1.0, 3.0]), "t": tokens([1, 2])}, 2)
    made = join_metrics([metrics.metrics(call_of(inputs=inputs)).metrics])
    assert (2.0, 1.0, 3.0) == (made["a_mean"], made["a_min"], made["a_max"])
    assert 4.0 == made["t_max"]
    made = metrics.metrics(call_of(inputs=inputs, function=lambda a, t: {"n": len(a) + len(t[1])}))
    assert {"n": 4.0} == made.metrics
    with pytest.raises(RunError, match="E641"):
        metrics.metrics(call_of(inputs=inputs, function=lambda a, t: 3))


# --- a user's op ----------------------------------------------------------------------------


def user_call(function, groups, per="group", outputs=("made",), made=("float32", "row"), **params):
    rows = len(groups)
    inputs = make_batch(
        {
            "x": torch.arange(rows, dtype=torch.float32),
            "tokens": tokens([1 + row % 2 for row in range(rows)]),
            "group": torch.tensor(groups),
        },
        rows,
    )
    dtype, level = made
    fields = tuple(Field(name=name, dtype=dtype, level=level) for name in outputs)
    return call_of(inputs=inputs, per=per, outputs=fields, function=function, params=params)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=16))
def test_a_group_op_sees_each_group_once_and_its_rows_come_back_in_order(groups):
    seen = []

    def centred(x, group):
        seen.append(sorted(set(group.tolist())))
        return x - x.mean()

    made = user.call(user_call(centred, groups)).fields["made"]
    assert sorted([g] for g in set(groups)) == sorted(seen)
    x = torch.arange(len(groups), dtype=torch.float32)
    member = torch.tensor(groups)
    expected = torch.stack([x[i] - x[member == member[i]].mean() for i in range(len(groups))])
    assert torch.equal(expected, made)


def test_a_group_op_may_make_tokens():
    call = user_call(lambda tokens, group: tokens, [1, 0, 1, 0], made=("int64", "token"))
    made = user.call(call).fields["made"]
    assert [[3], [3, 4], [3], [3, 4]] == [row.tolist() for row in split_rows(made)]


def test_a_batch_op_gets_everything_and_its_options():
    def shifted(x, *, by):
        return x + by

    made = user.call(user_call(shifted, [0, 1, 2], per="batch", by=10.0))
    assert [10.0, 11.0, 12.0] == made.fields["made"].tolist()
    assert 3 == made.rows


def test_an_op_with_several_outputs():
    function = lambda x: {"one": x, "two": 2 * x}  # noqa: E731
    made = user.call(user_call(function, [0, 0], per="row", outputs=("one", "two")))
    assert [0.0, 2.0] == made.fields["two"].tolist()
    with pytest.raises(RunError, match="made no field 'three' of 2 rows"):
        user.call(user_call(function, [0, 0], per="row", outputs=("one", "three")))


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "NoneType: None"),
        (3.0, "float: 3.0"),
        (torch.tensor(1.0), "a tensor of shape ()"),
        (torch.zeros(5), "a tensor of shape (5,)"),
        (tokens([1, 2, 3]), "a tensor of shape (3, "),
    ],
)
def test_what_is_not_a_field_of_the_rows_is_refused(value, got):
    with pytest.raises(RunError) as caught:
        user.call(user_call(lambda x: value, [0, 0], per="row"))
    assert "op made made no field 'made' of 2 rows" in str(caught.value)
    assert got in str(caught.value)


def test_an_op_that_raises_keeps_its_cause():
    with pytest.raises(RunError) as caught:
        user.call(user_call(lambda x: 1 / 0, [0], per="row"))
    assert "raised ZeroDivisionError: division by zero" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# --- data, rollout, evaluation --------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY))


def test_prompts_bring_what_is_wanted():
    source = rf.data.arithmetic(digits=2)
    call = call_of(
        params={"data": source, "batch": 3},
        wanted=("prompt", "row_id"),
        outputs=tuple(
            SimpleNamespace(name=name, dtype="text") for name in ("prompt", "row_id", "answer")
        ),
    )
    made = data.prompts(call)
    assert {"prompt", "row_id"} == set(made.fields)
    expected = source.batch(0, 3, 0)
    assert [row["prompt"] for row in expected] == strings(made.fields["prompt"])
    assert [row["row_id"] for row in expected] == made.fields["row_id"].tolist()


def test_tokenize_appends_eos(tokenizer):
    inputs = make_batch({"prompt": text(["1+1=", "2+3="]), "answer": text(["2", "15"])}, 2)
    made = data.tokenize(
        call_of(inputs=inputs, params={"tokenizer": str(TINY), "response": "answer"})
    )
    eos = tokenizer.eos_token_id
    rows = [row.tolist() for row in split_rows(made.fields["response_tokens"])]
    assert [eos, eos] == [row[-1] for row in rows]
    assert ["2", "15"] == [tokenizer.decode(row[:-1]) for row in rows]
    assert [2, 3] == lengths(made.fields["response_mask"]).tolist()
    assert flat(made.fields["response_mask"]).all()
    assert ["1+1=", "2+3="] == tokenizer.batch_decode(
        [row.tolist() for row in split_rows(made.fields["prompt_tokens"])]
    )


def test_an_empty_response_is_refused():
    inputs = make_batch({"prompt": text(["1+1=", "1"]), "answer": text(["2", ""])}, 2)
    with pytest.raises(DataError, match="made: an empty response in row 1"):
        data.tokenize(call_of(inputs=inputs, params={"tokenizer": "", "response": "answer"}))


def test_columns_that_are_not_text_become_json():
    assert "x" == data.as_text("x")
    assert '["é", 1]' == data.as_text(["é", 1])


def test_prompts_that_are_too_long_are_named():
    prompts, texts = tokens([4, 8, 9]), ["short", "fits", "too long"]
    common.too_long(call_of(), prompts, texts, 5, None)
    common.too_long(call_of(), prompts, texts, 5, 14)
    with pytest.raises(RunError) as caught:
        common.too_long(call_of(), prompts, texts, 5, 13)
    assert "9 prompt tokens + 5 new tokens, in row 2: 'too long'" in str(caught.value)
    assert "at most 13 tokens together" in str(caught.value)


def test_a_prompt_without_a_token_is_refused(tokenizer):
    with pytest.raises(RunError, match="made: a prompt without a token"):
        common.token_rows(call_of(), tokenizer, ["1", ""], False)


def test_chat_goes_through_the_template(tokenizer):
    said = [{"role": "user", "content": "1+1"}]
    rows = common.token_rows(
        call_of(), tokenizer, ["1+1", '[{"role": "user", "content": "1+1"}]'], True
    )
    first, second = (row.tolist() for row in split_rows(rows))
    assert first == second
    encoded = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)
    assert encoded["input_ids"] == first
    bare = SimpleNamespace(chat_template=None)
    with pytest.raises(RunError, match="the tokenizer has no chat template"):
        common.token_rows(call_of(), bare, ["1"], True)


class Speaker:
    """A model that answers every prompt with what a test says."""

    context = 64

    def __init__(self, tokenizer, answers):
        self.tokenizer = tokenizer
        self.answers = answers
        self.asked = []

    def generate(self, prompts, samples, *, n, **options):
        self.asked.append((len(lengths(prompts)), samples.tolist(), n, options))
        rows = [self.tokenizer(self.answers[i % len(self.answers)])["input_ids"] for i in samples]
        finished = [i % 2 == 0 for i in samples.tolist()]
        return generated(rows, [[-1.0] * len(row) for row in rows], finished)


SAMPLING = {"max_new_tokens": 8, "temperature": 1.0}


def test_a_rollout_is_prompt_major_and_numbers_its_samples(tokenizer):
    inputs = make_batch({"prompt": text(["1+1=", "2+2="]), "answer": text(["2", "4"])}, 2)
    wanted = ("response", "group", "sample", "answer", "response_mask", "prompt_tokens")
    model = Speaker(tokenizer, ["7", "12"])
    call = call_of(
        inputs=inputs, params={"n": 3, **SAMPLING}, wanted=wanted, model=model, iteration=5
    )
    made = rollout.rollout(call)
    assert 6 == made.rows
    assert set(wanted) == set(made.fields)
    assert ["2", "2", "2", "4", "4", "4"] == strings(made.fields["answer"])
    assert [10, 10, 10, 11, 11, 11] == made.fields["group"].tolist()
    assert list(range(30, 36)) == made.fields["sample"].tolist()
    assert ["7", "12"] * 3 == strings(made.fields["response"])
    assert [1, 2] * 3 == lengths(made.fields["response_mask"]).tolist()
    numbers = {"length": 1.5, "length_max": 2.0, "finished": 0.5, "entropy": 1.0}
    assert numbers == join_metrics([made.metrics])


@pytest.mark.parametrize(("limit", "count"), [(None, 4), (3, 3), (100, 4)])
def test_evaluate_counts_each_row_once(tokenizer, tmp_path, limit, count):
    file = tmp_path / "rows.jsonl"
    rows = [f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(4)]
    file.write_text("".join(rows))
    model = Speaker(tokenizer, ["1", "0", "3", "0"])
    seen = []

    def judge(response, answer):
        seen.append((response, answer))
        return float(response == answer)

    params = {"data": rf.data.jsonl(str(file)), "limit": limit, "function": judge, "batched": False}
    made = rollout.evaluate(call_of(params=params | SAMPLING, model=model))
    assert [("1", "1"), ("0", "2"), ("3", "3"), ("0", "4")][:count] == seen
    assert [(count, list(range(count)), 1)] == [asked[:3] for asked in model.asked]
    assert join_metrics([made.metrics])["reward"] == pytest.approx(2 / count)


# --- scores and advantages ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "output", "temperature"), [("log_probs", "log_probs", 0.7), ("values", "values", 1.0)]
)
def test_scores_take_the_name_the_node_gives(body, output, temperature):
    asked = []

    class Scorer:
        def forward(self, batch, *, outputs, temperature):
            asked.append((tuple(outputs), temperature))
            return {output: torch.tensor([1.0, 2.0, 6.0])}

    inputs = make_batch({"response_tokens": tokens([1, 2])}, 2)
    call = call_of(
        inputs=inputs,
        model=Scorer(),
        params={"temperature": 0.7},
        outputs=(SimpleNamespace(name="ref_log_probs"),),
    )
    made = getattr(forward, body)(call)
    assert [((output,), temperature)] == asked
    assert [[1.0], [2.0, 6.0]] == [row.tolist() for row in split_rows(made.fields["ref_log_probs"])]
    assert {"mean": 3.0} == join_metrics([made.metrics])


@pytest.mark.parametrize("wanted", [{"top_ids", "top_log_probs"}, {"ref_log_probs"}, set()])
def test_what_nobody_reads_beside_log_probs_is_not_asked_for(wanted):
    beside = ("sum_pi_squared", "top_log_probs", "top_ids", "top_rest")
    asked = []

    class Scorer:
        def forward(self, batch, *, outputs, temperature, top_k):
            asked.append((outputs, top_k))
            wide, one = torch.arange(6.0).view(3, 2), torch.ones(3)
            return {name: wide if name.startswith("top_") else one for name in outputs}

    call = call_of(
        inputs=make_batch({"response_tokens": tokens([1, 2])}, 2),
        model=Scorer(),
        params={"temperature": 1.0, "top_k": 2},
        outputs=tuple(SimpleNamespace(name=name) for name in ("ref_log_probs", *beside)),
        wanted=frozenset(wanted),
    )
    made = forward.log_probs(call)
    names = [name for name in beside if name in wanted]
    assert [(("log_probs", *names), 2)] == asked
    assert ["ref_log_probs", *names] == list(made.fields)
    for name in names:
        assert [[[0.0, 1.0]], [[2.0, 3.0], [4.0, 5.0]]] == [
            row.tolist() for row in made.fields[name].unbind()
        ]


def advantage_batch():
    sizes = [1, 2, 1, 2]
    return make_batch(
        {
            "reward": torch.tensor([1.0, 0.0, 1.0, 1.0]),
            "group": torch.tensor([0, 0, 1, 1]),
            "response_mask": mask(sizes),
            "rollout_log_probs": ragged_rows([[-1.0] * size for size in sizes], torch.float32),
            "ref_log_probs": ragged_rows([[-2.0] * size for size in sizes], torch.float32),
            "values": ragged_rows([[0.5] * size for size in sizes], torch.float32),
        },
        4,
    )


def test_grpo_counts_the_rows_that_teach_nothing():
    made = advantage.grpo(call_of(inputs=advantage_batch()))
    assert 0.5 == join_metrics([made.metrics])["zero"]
    first, second, *rest = made.fields["advantages"].tolist()
    assert first == -second > 0
    assert [0.0, 0.0] == rest


def test_a_kl_in_the_reward_is_subtracted_and_logged():
    plain = advantage.rloo(call_of(inputs=advantage_batch()))
    params = {"kl_coef": 0.5, "kl": "k1"}
    made = advantage.rloo(call_of(inputs=advantage_batch(), params=params))
    assert 1.0 == join_metrics([made.metrics])["kl"]
    assert "kl" not in plain.metrics
    assert [1.0, -1.0, 0.0, 0.0] == plain.fields["advantages"].tolist()
    assert [1.5, -1.5, 0.5, -0.5] == made.fields["advantages"].tolist()


@pytest.mark.parametrize("wanted", [("advantages",), ("advantages", "returns")])
def test_token_advantages_have_the_lengths_of_the_mask(wanted):
    params = {"gamma": 1.0, "lam": 1.0, "whiten": False}
    made = advantage.gae(call_of(inputs=advantage_batch(), params=params, wanted=wanted))
    assert set(wanted) == set(made.fields)
    assert [1, 2, 1, 2] == lengths(made.fields["advantages"]).tolist()
    assert [0.5, -0.5, -0.5, 0.5, 0.5, 0.5] == flat(made.fields["advantages"]).tolist()
