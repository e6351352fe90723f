"""Resharding between processes: gloo on this host, every transport but CUDA IPC."""

from __future__ import annotations

import random

import pytest

from tests.engines import reshard_ranks
from tests.engines.ranks import World
from tests.engines.reshard_layouts import SIZE, lacking, tables

pytestmark = pytest.mark.torch

BETWEEN = ("collective", "shared memory")
PARAMS = {
    "norm": (7,),
    "scale": (),
    "empty": (0, 4),
    "up.weight": (16, 12),
    "down.weight": (12, 16),
    "bank": (5, 3, 4),
    "large": (600, 520),
}


@pytest.fixture
def call(world):
    """Call a function in the first ranks of four processes, with their group."""

    def each(ranks, function, *arguments):
        return world(4).run(reshard_ranks.in_group, ranks, function, *arguments)[:ranks]

    return each


def least(source, targets, rank, each):
    found = lacking(source, targets, rank)
    return each * sum(int(mask.sum()) for mask in found.values())


PAIRS = [
    ("fsdp", [0, 1], "tp rows", [0, 1]),
    ("fsdp", [0, 1, 2, 3], "whole", [0, 1, 2, 3]),
    ("fsdp x tp", [0, 1, 2, 3], "whole", [0, 1, 2, 3]),
    ("hsdp", [0, 1, 2, 3], "tp columns", [0, 1, 2]),
    ("fsdp in tp", [0, 1, 2, 3], "tp rows", [2, 3]),
    ("fsdp", [0, 1], "whole", [2, 3]),
    ("whole", [1], "dp x tp", [0, 1, 2, 3]),
    ("dp x tp", [0, 1, 2, 3], "fsdp", [3, 1, 2]),
]


@pytest.mark.rows(8)
@pytest.mark.parametrize("transport", BETWEEN)
@pytest.mark.parametrize(
    ("pair", "bucket"),
    [
        *(pytest.param(pair, 256, id=f"{pair[0]} to {pair[2]}") for pair in PAIRS),
        *(
            pytest.param(pair, 64 << 20, id=f"{pair[0]} to {pair[2]} at once")
            for pair in PAIRS[::3]
        ),
    ],
)
def test_targets_are_the_source_bit_for_bit_with_the_least_bytes(call, pair, transport, bucket):
    small = {name: shape for name, shape in PARAMS.items() if name != "large"}
    params = PARAMS if bucket > 256 else small
    source, target = tables(params, *pair[:2]), tables(params, *pair[2:])
    count = 1 + max([*pair[1], *pair[3]])

    found = call(
        count, reshard_ranks.reshard, transport, source, [target], {"bucket_bytes": bucket}
    )

    for rank, (moved, again) in enumerate(found):
        expected = least(source, [target], rank, 4)
        assert expected == moved.received == again.received
        assert moved.staged <= 2 * bucket
        assert (moved.buckets > 0) or expected == 0


@pytest.mark.parametrize("transport", BETWEEN)
@pytest.mark.parametrize(
    ("had", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16")]
)
def test_the_smaller_dtype_travels(call, transport, had, wanted):
    source = tables(PARAMS, "fsdp", [0, 1, 2], had)
    target = tables(PARAMS, "tp rows", [1, 2, 3], wanted)

    found = call(4, reshard_ranks.reshard, transport, source, [target], {})

    each = min(SIZE[had], SIZE[wanted])
    received = [moved.received for moved, _ in found]
    assert [least(source, [target], rank, each) for rank in range(4)] == received


@pytest.mark.parametrize("transport", BETWEEN)
def test_several_targets_share_a_pass(call, transport):
    source = tables(PARAMS, "fsdp", [0, 1])
    targets = [
        tables(PARAMS, "whole", [1, 2]),
        tables(PARAMS, "tp rows", [2, 3]),
        tables(PARAMS, "tp columns", [0, 1, 2]),
        tables(PARAMS, "whole", [3]),
        tables(PARAMS, "whole", [3]),
    ]

    found = call(4, reshard_ranks.reshard, transport, source, targets, {})

    received = [moved.received for moved, _ in found]
    assert [least(source, targets, rank, 4) for rank in range(4)] == received


@pytest.mark.parametrize("transport", BETWEEN)
def test_dtypes_of_all_widths_share_a_message(call, transport):
    dtypes = ("uint8", "float64", "bfloat16", "float32")
    source, target = {0: {}}, {1: {}}
    for number, dtype in enumerate(dtypes):
        name, shape = f"p{number}", (3 + number,)
        source[0] |= tables({name: shape}, "whole", [0], dtype)[0]
        target[1] |= tables({name: shape}, "whole", [1], dtype)[1]

    found = call(2, reshard_ranks.reshard, transport, source, [target], {"bucket_bytes": 256})

    assert 3 + 4 * 8 + 5 * 2 + 6 * 4 == found[1][0].received


@pytest.mark.parametrize("transport", BETWEEN)
def test_messages_of_two_senders_are_aligned_for_themselves(call, transport):
    source = {
        0: tables({"a": (1,), "b": (2,)}, "whole", [0], "uint8")[0],
        1: tables({"c": (1,), "d": (4,)}, "whole", [1], "float64")[1],
    }
    target = {2: source[0] | source[1]}

    found = call(3, reshard_ranks.reshard, transport, source, [target], {})

    assert 3 + 5 * 8 == found[2][0].received


@pytest.mark.rows(1)
@pytest.mark.parametrize("transport", BETWEEN)
def test_memory_grows_by_buckets_and_not_by_the_model(call, transport):
    params = {f"p{number}": (2048, 1024) for number in range(12)}
    source, target = tables(params, "tp rows", [0]), tables(params, "tp rows", [1], "bfloat16")

    grown = call(2, reshard_ranks.peak_of_a_run, transport, source, target)

    # The model has 96 MB, what travels 48, and the two buckets on a host 16.
    assert max(grown) < 24


@pytest.mark.parametrize("transport", BETWEEN)
@pytest.mark.parametrize("seed", range(3))
def test_layouts_drawn_at_random(call, transport, seed):
    drawn = random.Random(seed)
    kinds = ("fsdp", "hsdp", "tp columns", "tp rows", "fsdp in tp", "fsdp x tp", "whole")
    one, other = ((drawn.choice(kinds), drawn.sample(range(4), 4)) for _ in range(2))
    params = {
        f"p{number}": tuple(drawn.randrange(1, 9) for _ in range(drawn.randrange(4)))
        for number in range(12)
    }
    source, target = tables(params, *one), tables(params, *other, "bfloat16")

    found = call(4, reshard_ranks.reshard, transport, source, [target], {"bucket_bytes": 512})

    received = [moved.received for moved, _ in found]
    assert [least(source, [target], rank, 2) for rank in range(4)] == received


@pytest.mark.parametrize("transport", BETWEEN)
def test_only_what_is_named_arrives(call, transport):
    params = {"base": (6, 4), "lora_A": (2, 4), "lora_B": (6, 2)}
    source, target = tables(params, "fsdp", [0, 1]), tables(params, "whole", [0, 1])
    only = frozenset({"lora_A", "lora_B"})

    found = call(2, reshard_ranks.only, transport, source, target, only)

    adapters = {name: shape for name, shape in params.items() if name in only}
    for rank, (moved, untouched) in enumerate(found):
        source, target = tables(adapters, "fsdp", [0, 1]), tables(adapters, "whole", [0, 1])
        assert least(source, [target], rank, 4) == moved.received
        assert untouched


@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "where", [("source", 1, "up.weight"), ("target", 0, "norm"), ("target", 3, "down.weight")]
)
def test_the_check_names_what_differs_on_every_rank(call, where, wanted):
    source = tables(PARAMS, "hsdp", [0, 1, 2, 3])
    target = tables(PARAMS, "dp x tp", [0, 1, 2, 3], wanted)

    found = call(4, reshard_ranks.damaged, source, target, where)

    for differing, expected in found:
        assert [where[2]] == list(differing)
        first, second = differing[where[2]]
        assert first != second
        if where[0] == "target":
            assert expected == first


def test_segments_have_no_name_in_the_file_system(call):
    source, target = tables(PARAMS, "fsdp", [0, 1]), tables(PARAMS, "whole", [0, 1])

    call(2, reshard_ranks.make, "shared memory", source, target)
    during = call(2, reshard_ranks.mappings)
    call(2, reshard_ranks.drop_made)
    after = call(2, reshard_ranks.mappings)

    for text in during:
        assert 2 <= text.count("/memfd:rlflow (deleted)")
        assert "/dev/shm" not in text
    assert not [text for text in after if "memfd:rlflow" in text]


def test_a_peer_that_cannot_be_opened_is_an_error_everywhere(call):
    source, target = tables(PARAMS, "fsdp", [0, 1, 2]), tables(PARAMS, "whole", [0, 1, 2])
    words = ("shared memory", source, [target], {})

    gone = call(3, reshard_ranks.errors_as, 2**22 + 1, *words)
    other = call(3, reshard_ranks.errors_as, 1, *words)

    assert 1 == len(set(gone)) == len(set(other))
    for message in (gone[0], other[0]):
        assert "E543" in message
        assert "/proc/" in message
        assert 'transport="collective"' in message


@pytest.mark.parametrize(
    ("transport", "options", "code"),
    [
        ("copy", {}, "E543"),
        ("carrier pigeon", {}, "E543"),
        ("collective", {"bucket_bytes": 8}, "E543"),
        ("collective", {"only": frozenset({"nrom"})}, "E540"),
    ],
)
def test_what_cannot_be_done_is_refused_by_every_rank(call, transport, options, code):
    source, target = tables(PARAMS, "fsdp", [0, 1]), tables(PARAMS, "whole", [1])

    found = call(2, reshard_ranks.errors, transport, source, [target], options)

    assert 1 == len(set(found))
    assert found[0].startswith(f"error[{code}]")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"bucket_bytes": 64}, {"bucket_bytes": 128}),
        ({"only": frozenset({"norm"})}, {"only": frozenset({"scale"})}),
        ({"only": frozenset({"norm"})}, {}),
    ],
)
def test_ranks_that_disagree_are_refused_by_every_rank(call, one, other):
    source, target = tables(PARAMS, "fsdp", [0, 1]), tables(PARAMS, "whole", [1])

    found = call(2, reshard_ranks.errors_of_own_options, source, target, [one, other])

    assert 1 == len(set(found))
    assert "E541" in found[0]


def test_the_source_says_what_is_sent(call):
    source, target = tables(PARAMS, "fsdp", [0]), tables(PARAMS, "whole", [1])
    options = {"only": frozenset(PARAMS)}

    found = call(2, reshard_ranks.reshard, "collective", source, [target], options)

    assert least(source, [target], 1, 4) == found[1][0].received


def test_a_shard_that_is_not_its_box_is_refused_by_every_rank(call):
    source, target = tables(PARAMS, "fsdp", [0, 1]), tables(PARAMS, "whole", [1])

    found = call(2, reshard_ranks.errors_of_a_wrong_shard, source, target)

    assert 1 == len(set(found))
    assert "E541" in found[0]
    assert "'norm'" in found[0]


@pytest.mark.parametrize("transport", BETWEEN)
def test_a_lost_rank_is_an_error_and_not_a_hang(transport):
    source, target = tables(PARAMS, "fsdp", [0, 1, 2]), tables(PARAMS, "whole", [0, 1, 2])
    world = World(3)
    try:
        words = (reshard_ranks.in_group, 3, reshard_ranks.make, transport, source, target)
        world.run(*words)
        # Who waits for another who waits for the lost one hears of it when the time is up.
        world.run(reshard_ranks.wait_no_longer_than, 3, 1)
        world.processes[2].kill()
        world.processes[2].join()
        for rank in (0, 1):
            world.pipes[rank].send((reshard_ranks.run_made, ()))

        for rank in (0, 1):
            assert world.pipes[rank].poll(90), "it hangs"
            good, message = world.pipes[rank].recv()
            assert good
            assert message.startswith("error[E544]")
    finally:
        world.close()
