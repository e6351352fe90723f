"""All rows: those with runs of their own, and those that tests of other suites are."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from functools import partial

from tests.chaos.host_rows import host_rows
from tests.chaos.hosts import no_hosts
from tests.chaos.matrix import Expectation, Row
from tests.chaos.outside_rows import outside_rows
from tests.chaos.run_rows import run_rows
from tests.chaos.scene import Scene
from tests.conftest import ROOT

FAULTS = "runtime/on_ray/test_faults.py::test_"
SESSION = "runtime/on_ray/test_session.py::test_"
DAMAGE = "runtime/test_checkpoint_damage.py::test_"
DISK = "runtime/test_checkpoint_faults.py::test_"
ATTACKS = "rewards/test_sandbox_attacks.py::test_"
JAIL = "rewards/test_sandbox.py::test_"
JUDGE = "rewards/test_judging.py::test_"
REMOTE = "rewards/test_remote.py::test_"
ENGINE = "engines/sglang/test_sglang"
VLLM = "engines/test_vllm.py::test_"
BAD = "test_bad_input.py::test_"
NUMBERS = "ops/test_not_finite.py::test_"

# id, fault, expectation, seconds at most, what it needs, and the tests that are it.
Told = tuple[str, str, Expectation, float, str, tuple[str, ...]]
TESTED: tuple[Told, ...] = (
    (
        "K1 ranks",
        "SIGKILL of a rank while it runs, sends, sleeps, wakes, reshards; of the host worker",
        "error",
        900,
        "ray",
        (f"{FAULTS}a_killed_rank_ends_the_run_with_one_error_and_no_process_left",),
    ),
    (
        "K1 other ranks",
        "SIGKILL of a rank, resumed on another number of ranks",
        "error",
        240,
        "ray",
        (f"{FAULTS}what_a_killed_run_left_continues_on_another_number_of_ranks",),
    ),
    (
        "K1 saving ranks",
        "SIGKILL of a rank between its shards, before its report, in the first save",
        "error",
        300,
        "ray",
        (
            f"{FAULTS}a_rank_killed_while_it_saves_leaves_the_checkpoint_before",
            f"{FAULTS}a_rank_killed_in_the_first_save_leaves_a_run_that_begins_again",
        ),
    ),
    (
        "K4 ranks",
        "SIGSTOP of a rank: it alone is blamed",
        "error",
        300,
        "ray",
        (f"{FAULTS}a_frozen_rank_is_an_error_within_the_deadline",),
    ),
    (
        "K6 ranks",
        "Ctrl-C of the driver and of every rank at once",
        "continues",
        180,
        "ray",
        (f"{FAULTS}ctrl_c_saves_and_ends_well",),
    ),
    (
        "K10 driver",
        "SIGKILL of the driver of a cluster; the cluster ends with it, also without its reaper",
        "continues",
        300,
        "ray",
        (
            f"{FAULTS}a_killed_controller_leaves_no_process",
            f"{SESSION}nothing_is_left_of_an_embedded_cluster_however_its_controller_ends",
        ),
    ),
    (
        "K11 head",
        "the head of the cluster is lost; nobody listens; what listens is no head",
        "error",
        240,
        "ray",
        (
            f"{SESSION}a_cluster_that_dies_is_reported_and_can_still_be_closed",
            "runtime/on_ray/test_joining.py",
        ),
    ),
    (
        "K12",
        "results in every order, a failure in any of them: virtual clock",
        "continues",
        300,
        "",
        ("runtime/test_fake.py", "runtime/test_monitor.py"),
    ),
    (
        "K13",
        "slow but moving, and hung, on threads and on ranks",
        "goes on",
        180,
        "ray",
        (
            "runtime/on_ray/test_progress.py",
            "runtime/test_deadlines.py::test_what_is_slow_but_moves_is_not_given_up",
        ),
    ),
    (
        "K14",
        "grandchildren of a killed reward worker, in sessions of their own",
        "goes on",
        60,
        "",
        (
            "rewards/test_workers.py::test_what_a_call_started_ends_with_it",
            "rewards/test_workers.py::test_what_a_call_started_ends_with_a_process_that_left",
        ),
    ),
    (
        "D1",
        "SIGKILL after every write, fsync and rename of a save, in seven situations",
        "continues",
        300,
        "",
        (
            f"{DISK}kill_at_every_failpoint_leaves_the_old_or_the_new",
            f"{DISK}kill_during_the_save_after_a_killed_save",
            f"{DISK}half_deleted_checkpoint_never_bears_its_name",
            "runtime/test_checkpoint_shards.py::test_a_kill_between_shards_or_reports_leaves_the_checkpoint_before",
        ),
    ),
    (
        "D2-D5",
        "every file cut, every bit flipped, deleted, swapped, one more; every bit of LATEST",
        "continues",
        240,
        "",
        ("runtime/test_checkpoint_damage.py",),
    ),
    (
        "D6-D7",
        "no space at each file, a limit of sizes, EIO and others of fsync",
        "error",
        120,
        "",
        (
            f"{DISK}full_disk_keeps_the_previous_and_removes_the_rest",
            f"{DISK}full_disk_at_latest_leaves_both_and_no_leftover",
            f"{DISK}free_space_is_looked_at_first",
            f"{DISK}file_size_limit_is_named",
            f"{DISK}errors_of_fsync_are_translated",
            "runtime/test_ending.py",
        ),
    ),
    (
        "D10",
        "the writer beside the run fails, is held up, is given up",
        "error",
        120,
        "",
        (
            "runtime/test_checkpoint_shards.py::test_a_disk_that_is_full_in_the_background_is_the_callers_error_once",
            "runtime/test_checkpoint_shards.py::test_a_save_that_is_given_up_leaves_nothing",
            "runtime/test_resume.py::test_a_save_waits_for_the_one_before_and_changes_no_bit",
        ),
    ),
    (
        "D13",
        "a pickle with a canary in a checkpoint",
        "continues",
        30,
        "",
        (f"{DAMAGE}pickle_in_a_checkpoint_is_never_executed",),
    ),
    (
        "R4",
        "a wrong number of rewards, of the wrong types",
        "error",
        60,
        "",
        (
            "ops/test_bodies.py::test_a_batch_reward_of_the_wrong_length",
            "ops/test_bodies.py::test_what_is_no_reward_names_the_sample",
        ),
    ),
    (
        "R7",
        "a flaky function, tried again and counted",
        "goes on",
        45,
        "",
        (f"{JUDGE}a_flaky_function_is_called_again_and_the_attempts_are_counted",),
    ),
    (
        "R9",
        "a judge: 500, 429, no answer, dripping, invalid JSON, another schema, nobody",
        "goes on",
        60,
        "",
        ("rewards/test_remote.py",),
    ),
    (
        "R11",
        "an error of our own beside a reward, an answer to another call",
        "error",
        60,
        "",
        (
            f"{JUDGE}an_error_of_rlflows_own_is_no_failure_of_a_sample",
            "rewards/test_workers.py::test_an_answer_to_another_call_is_not_taken",
        ),
    ),
    (
        "S1",
        "fork bombs, memory, files, output, spins, waits, daemons",
        "goes on",
        240,
        "",
        (
            f"{JAIL}a_fork_bomb_is_contained",
            f"{JAIL}a_daemon_dies_with_its_jail",
            f"{JAIL}endless_output_is_cut",
            f"{JAIL}a_program_that_waits_is_ended_by_the_wall_clock",
            "rewards/test_sandbox_attacks.py",
        ),
    ),
    (
        "S2",
        "network, files, environment, processes, privileges of the machine",
        "goes on",
        120,
        "",
        (
            f"{JAIL}what_a_program_may_not_do",
            f"{JAIL}a_server_of_this_machine_is_out_of_reach",
            f"{JAIL}the_environment_stays_outside",
            f"{JAIL}signals_reach_nobody_outside",
            f"{JAIL}privileges_cannot_be_had",
            f"{JAIL}what_is_shown_is_read_only",
        ),
    ),
    (
        "S3",
        "verdicts forged in every way that is known",
        "goes on",
        120,
        "",
        ("rewards/test_verdicts.py",),
    ),
    (
        "S4",
        "no jail can be made",
        "refused",
        60,
        "",
        (
            f"{JAIL}a_jail_that_cannot_be_made_is_an_error_and_not_a_weaker_one",
            "rewards/test_programs.py::test_a_run_with_programs_needs_a_jail_before_it_starts",
        ),
    ),
    (
        "G1-G2",
        "no response, prompts without room or without a token",
        "refused",
        60,
        "",
        (
            "ops/test_bodies.py::test_an_empty_response_is_refused",
            "ops/test_bodies.py::test_a_prompt_without_a_token_is_refused",
            "engines/test_rollout.py::test_a_prompt_without_room_is_named",
            f"{BAD}a_prompt_longer_than_the_context",
        ),
    ),
    (
        "G4",
        "logits and log-probs that are not finite, tokens that cannot be",
        "error",
        60,
        "",
        (
            "engines/test_sampling.py::test_logits_that_are_not_finite_draw_a_token_whose_log_prob_says_so",
            f"{NUMBERS}a_field_that_is_not_finite_is_named_with_its_row_and_token",
        ),
    ),
    (
        "G6",
        "an engine is lost in the middle of a generation: each sample exactly once",
        "continues",
        600,
        "sglang",
        ("runtime/test_engine_faults.py",),
    ),
    (
        "G4 answers",
        "an engine answers rows twice, text without ids, no log-probs, ids beyond the vocabulary",
        "error",
        60,
        "",
        (f"{ENGINE}_rows.py",),
    ),
    (
        "G4 sglang",
        "the same of a real SGLang; log-probs that are no numbers; weights torn in two; versions",
        "error",
        300,
        "sglang",
        ("engines/faults/test_spoiled_answers.py",),
    ),
    (
        "G4 vllm",
        "the same of a real vLLM",
        "error",
        300,
        "vllm",
        ("engines/faults/test_spoiled_answers.py",),
    ),
    (
        "G6 sglang",
        "a real SGLang is killed, stopped: in a generation, a piece, an update, asleep, twice",
        "continues",
        600,
        "sglang",
        ("engines/faults/test_lost_engines.py",),
    ),
    (
        "G6 vllm",
        "a real vLLM is killed, stopped: in a generation, an update, asleep, twice, in a run",
        "continues",
        600,
        "vllm",
        (
            "engines/faults/test_lost_engines.py",
            "runtime/test_vllm_runs.py::test_a_run_goes_on_where_its_engine_is_killed",
        ),
    ),
    (
        "G7 sglang",
        "one byte of a weight of a real SGLang is another; its cache after an update",
        "error",
        300,
        "sglang",
        (f"{ENGINE}_weights.py",),
    ),
    (
        "G7 vllm",
        "weights of a real vLLM that are not those of the trainer; its cache after an update",
        "error",
        300,
        "vllm",
        (
            f"{VLLM}weights_that_differ_are_found",
            f"{VLLM}new_weights_reach_the_engine_and_its_cache_of_prefixes_is_emptied",
        ),
    ),
    (
        "G7",
        "weights that are stale, half new, one bit off",
        "error",
        60,
        "",
        (
            "runtime/test_worker.py::test_a_reshard_that_left_one_bit_different_is_found",
            "runtime/test_worker.py::test_stale_weights_are_refused",
        ),
    ),
    (
        "G9",
        "tokens older than the bound",
        "goes on",
        60,
        "",
        ("ops/test_staleness_bodies.py",),
    ),
    (
        "N1",
        "NaN and infinity in one row, one micro-batch, on one rank alone: no bit moves",
        "goes on",
        240,
        "",
        (
            "engines/test_train.py::test_a_number_that_is_not_finite_changes_nothing",
            "engines/test_sharded_state.py::test_a_number_that_is_not_finite_on_one_rank_changes_nothing_anywhere",
            "ops/test_bodies.py::test_an_update_without_a_finite_step_is_an_error",
        ),
    ),
    (
        "N2",
        "NaN under the mask of every field",
        "goes on",
        120,
        "",
        (
            f"{NUMBERS}a_forward_that_is_not_finite_spoils_the_step_and_masked_tokens_never_do",
            "ops/math/test_math_every_loss.py::test_padding_empty_rows_and_garbage_under_the_mask_change_nothing",
        ),
    ),
    (
        "N4",
        "no token to train in a row, a micro-batch, a rank",
        "goes on",
        120,
        "",
        (
            "engines/test_train.py::test_rows_without_tokens_and_batches_without_rows",
            "engines/test_sharded_state.py::test_losses_without_gradient_keep_step",
        ),
    ),
    (
        "N5",
        "no memory in a forward, a backward, a step, a rollout, a reshard; finer micro-batches",
        "error",
        120,
        "",
        (
            "engines/test_train.py::test_without_memory_micro_batches_are_cut_finer_and_gradients_stay",
            "engines/test_train.py::test_a_row_that_has_no_room_is_the_error_that_it_was",
            "runtime/test_worker.py::test_no_memory_is_one_error_that_leaves_the_weights_and_frees_what_was_taken",
        ),
    ),
    (
        "N8",
        "policies that are far apart",
        "goes on",
        60,
        "",
        (
            "ops/math/test_math_losses.py::test_the_ratio_is_finite_however_far_the_policy_moved",
            "ops/test_staleness_weights.py::test_far_apart_policies_have_finite_ratios",
        ),
    ),
    (
        "C1",
        "cycles, dangling inputs, unknown names, wrong types",
        "refused",
        60,
        "",
        ("graph/test_trace.py",),
    ),
    (
        "C3",
        "devices, placements, settings and models that are wrong",
        "refused",
        180,
        "",
        ("test_bad_input.py",),
    ),
    ("C4", "numbers out of range in every option", "refused", 120, "", ("test_strict.py",)),
    ("C6", "files of models with anything in them", "refused", 240, "", ("test_fuzzed_models.py",)),
    (
        "X3 ray",
        "sockets of an embedded cluster",
        "goes on",
        120,
        "ray",
        (f"{SESSION}an_embedded_cluster_has_one_node_on_the_loopback",),
    ),
)
# Of the study's matrix, what no row here is, and why.
MISSING = (
    Row(id="K14 gpu", fault="a killed engine's memory on the device", expect="error", needs="gpu"),
)
ENGINES = ("sglang", "vllm")
WHY = {
    "gpu": "this machine has no GPU",
}


def passes(tests: tuple[str, ...], seconds: float, engine: str, scene: Scene) -> None:
    """The tests pass, at least one of them was run; `fired` counts those.

    Of tests that several engines run, those of one `engine`.
    """
    report = scene.folder / "tests.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-showlocals"]
    names = [f"{ROOT}/tests/{name}" for name in tests]
    words += ["-m", engine] * bool(engine)
    made = [*words, f"--junitxml={report}", f"--basetemp={scene.folder / 'b'}", *names]
    scene.folder.joinpath("b").mkdir()
    started = scene.started([*made, f"--rootdir={ROOT}", "-c", ROOT / "pyproject.toml"])
    result = scene.ended(started, seconds)
    assert 0 == result.code, (result.out + result.err)[-4000:]
    cases = list(ET.parse(report).iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    scene.fired = len(cases) - len(skipped)
    if not scene.fired:
        scene.skipped = skipped[0].find("skipped").get("message", "")  # type: ignore[union-attr]


def tested_rows() -> list[Row]:
    """The rows that are tests of other suites."""
    return [
        Row(
            id=name,
            fault=fault,
            expect=expect,
            seconds=seconds,
            needs=needs,  # type: ignore[arg-type]
            inject=partial(passes, tests, seconds, needs if needs in ENGINES else ""),
            own=False,
        )
        for name, fault, expect, seconds, needs, tests in TESTED
    ]


ROWS: list[Row] = sorted(
    [*run_rows(), *outside_rows(), *host_rows(), *tested_rows(), *MISSING],
    key=lambda row: "KDRSGNCX".index(row.id[0]),
)


def why_not(row: Row) -> str:
    """Why a row cannot be run here; nothing where it can."""
    return no_hosts() if row.needs == "hosts" else WHY.get(row.needs, "")
