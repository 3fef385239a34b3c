"""Batches that can start anywhere, for any number of processes."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt.training.data import batches, validation_batches

# ---------------------------------------------------------------- training batches


def window_ids(batch, seq_len: int) -> list[int]:
    """Which windows of `np.arange` a batch holds, in order."""
    return (batch["inputs"][..., 0] // seq_len).ravel().tolist()


def take(count: int, **options) -> list[int]:
    """The windows of the first `count` batches."""
    ids = []
    with batches(**options) as stream:
        for _ in range(count):
            ids += window_ids(next(stream), options["seq_len"])
    return ids


def test_a_batch_holds_windows_and_the_tokens_after_them():
    with batches(
        np.arange(100, 151, dtype=np.uint16),
        seq_len=5,
        batch_size=8,
        accumulate=2,
        seed=0,
    ) as stream:
        batch = next(stream)
    assert {name: (a.dtype.name, a.shape) for name, a in batch.items()} == {
        "inputs": ("int32", (2, 4, 5)),
        "targets": ("int32", (2, 4, 5)),
        "weights": ("float32", (2, 4, 5)),
    }
    starts = batch["inputs"][..., 0]
    assert np.unique(starts).size == 8 and set((starts % 5).ravel()) == {0}
    np.testing.assert_array_equal(
        batch["inputs"] - starts[..., None], np.broadcast_to(np.arange(5), (2, 4, 5))
    )
    np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)
    assert batch["weights"].min() == batch["weights"].max() == 1.0


@pytest.mark.parametrize("num_tokens, windows", [(61, 20), (63, 20), (64, 21)])
def test_every_epoch_has_every_window_once_in_a_new_order(num_tokens, windows):
    options = dict(tokens=np.arange(num_tokens), seq_len=3, batch_size=windows)
    ids = take(3, seed=1, **options)
    epochs = [ids[i * windows : (i + 1) * windows] for i in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(windows))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert take(1, seed=2, **options) not in epochs


def test_the_order_is_pinned():
    # A run resumed under another version of Grain must see the same examples.
    options = dict(tokens=np.arange(9), seq_len=1, batch_size=8, seed=0)
    assert take(2, **options) == [1, 2, 4, 5, 3, 7, 0, 6] + [7, 6, 1, 4, 2, 0, 3, 5]


def test_an_epoch_may_be_shorter_than_a_batch():
    ids = take(2, tokens=np.arange(7), seq_len=2, batch_size=6, seed=0)
    assert [sorted(ids[i : i + 3]) for i in range(0, 12, 3)] == [[0, 1, 2]] * 4
    assert take(2, tokens=np.arange(3), seq_len=2, batch_size=2, seed=0) == [0] * 4


TOKENS, SEQ_LEN = np.arange(2 * 37 + 1), 2  # 37 windows
UNINTERRUPTED = take(400, tokens=TOKENS, seq_len=SEQ_LEN, batch_size=1, seed=5)


@settings(max_examples=30, deadline=None)
@given(
    position=st.integers(0, 300),
    rows=st.integers(1, 5),
    accumulate=st.sampled_from([1, 2, 3]),
    processes=st.sampled_from([1, 2, 4]),
)
def test_any_position_goes_on_as_if_uninterrupted(
    position, rows, accumulate, processes
):
    batch_size = rows * accumulate * processes
    shares = []
    for index in range(processes):
        with batches(
            TOKENS,
            seq_len=SEQ_LEN,
            batch_size=batch_size,
            accumulate=accumulate,
            seed=5,
            position=position,
            process_index=index,
            process_count=processes,
        ) as stream:
            batch = next(stream)
            assert stream.position == position + batch_size
        assert batch["inputs"].shape == (accumulate, rows, SEQ_LEN)
        shares.append(batch["inputs"])
    together = np.concatenate(shares, axis=1)  # blocks within each micro-batch
    expected = UNINTERRUPTED[position : position + batch_size]
    assert window_ids({"inputs": together}, SEQ_LEN) == expected


def test_the_documented_place_of_every_example():
    accumulate, processes, rows, position = 2, 2, 3, 41
    for k in range(processes):
        with batches(
            TOKENS,
            seq_len=SEQ_LEN,
            batch_size=accumulate * processes * rows,
            accumulate=accumulate,
            seed=5,
            position=position,
            process_index=k,
            process_count=processes,
        ) as stream:
            batch = next(stream)
        for m in range(accumulate):
            for r in range(rows):
                n = position + (m * processes + k) * rows + r
                assert batch["inputs"][m, r, 0] // SEQ_LEN == UNINTERRUPTED[n]


def test_batch_size_and_processes_may_change_midway():
    options = dict(tokens=TOKENS, seq_len=SEQ_LEN, seed=5)
    ids = take(5, batch_size=6, accumulate=3, **options)
    position = len(ids)
    halves = [
        take(4, batch_size=10, position=position, process_index=k, process_count=2,
             **options)
        for k in range(2)
    ]  # fmt: skip
    for step in range(4):
        ids += halves[0][step * 5 : step * 5 + 5] + halves[1][step * 5 : step * 5 + 5]
    ids += take(2, batch_size=7, position=len(ids), **options)
    assert len(ids) == 30 + 40 + 14
    assert ids == UNINTERRUPTED[: len(ids)]


@pytest.mark.parametrize("num_sequences, count", [(0, 0), (8, 2), (80, 20)])
def test_num_sequences_ends_the_stream(num_sequences, count):
    options = dict(seq_len=SEQ_LEN, batch_size=4, seed=5, position=3)
    with batches(TOKENS, num_sequences=num_sequences, **options) as stream:
        ids = [i for batch in stream for i in window_ids(batch, SEQ_LEN)]
        assert stream.position == 3 + num_sequences
    assert len(ids) == 4 * count
    assert ids == UNINTERRUPTED[3 : 3 + 4 * count]


def test_tokens_may_be_mapped(tmp_path):
    TOKENS.astype("<u2").tofile(tmp_path / "a.bin")
    mapped = np.memmap(tmp_path / "a.bin", "<u2", mode="r")
    ids = take(10, tokens=mapped, seq_len=SEQ_LEN, batch_size=3, seed=5)
    assert ids == UNINTERRUPTED[:30]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(batch_size=6, accumulate=2, process_count=2),
            r"batch_size=6 is not a multiple of accumulate \* process_count = 2 \* 2",
        ),
        (dict(process_index=2, process_count=2), "process_index=2 is not below"),
        (dict(batch_size=0), "batch_size=0 and accumulate=1 must be at least 1"),
        (dict(num_sequences=6), "num_sequences=6 is not a multiple of batch_size=4"),
        (dict(position=-1), "got seed=0 and position=-1"),
        (dict(seed=-1), "got seed=-1 and position=0"),
        (dict(seq_len=75), "75 tokens hold no window of seq_len \\+ 1 = 76"),
    ],
)
def test_arguments_are_checked(options, message):
    defaults = dict(seq_len=SEQ_LEN, batch_size=4, seed=0)
    with pytest.raises(ValueError, match=message):
        batches(TOKENS, **{**defaults, **options})


def test_close_ends_the_threads():
    before = set(threading.enumerate())
    stream = batches(TOKENS, seq_len=SEQ_LEN, batch_size=4, seed=0)
    next(stream)
    started = set(threading.enumerate()) - before
    assert 1 <= len(started) <= 2
    stream.close()
    for thread in started:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in started)


def test_a_program_ends_with_an_open_stream():
    program = (
        "import numpy as np\n"
        "from jaxckpt.training.data import batches\n"
        "s = batches(np.arange(99), seq_len=2, batch_size=4, seed=0)\n"
        "print(next(s)['inputs'].shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 4, 2)\n", "")


# ---------------------------------------------------------------- validation batches


def test_validation_goes_through_the_windows_in_order_and_pads_the_end():
    stream = validation_batches(
        np.arange(10, 22, dtype=np.uint8), seq_len=4, batch_size=2, max_batches=None
    )
    first, second = stream
    assert first["inputs"].tolist() == [[[10, 11, 12, 13], [14, 15, 16, 17]]]
    assert first["targets"].tolist() == [[[11, 12, 13, 14], [15, 16, 17, 18]]]
    assert first["weights"].tolist() == [[[1] * 4] * 2]
    assert second["inputs"].tolist() == [[[18, 19, 20, 0], [0] * 4]]
    assert second["targets"].tolist() == [[[19, 20, 21, 0], [0] * 4]]
    assert second["weights"].tolist() == [[[1, 1, 1, 0], [0] * 4]]
    assert [a.dtype.name for a in first.values()] == ["int32", "int32", "float32"]


@pytest.mark.parametrize(
    "num_tokens, expected", [(2, 1), (9, 1), (10, 2), (17, 2), (18, 3)]
)
def test_validation_sees_every_target_once(num_tokens, expected):
    found = list(
        validation_batches(
            np.arange(num_tokens), seq_len=4, batch_size=2, max_batches=None
        )
    )
    assert len(found) == expected
    targets = [t for b in found for t in b["targets"][b["weights"] == 1].tolist()]
    assert targets == list(range(1, num_tokens))
    assert {b["inputs"].shape for b in found} == {(1, 2, 4)}


@pytest.mark.parametrize("processes", [2, 4])
def test_validation_processes_share_each_batch(processes):
    options = dict(seq_len=3, batch_size=8, max_batches=None)
    tokens = np.arange(60)  # 20 windows: the last batch is half empty
    whole = list(validation_batches(tokens, **options))
    shares = [
        list(
            validation_batches(
                tokens, process_index=k, process_count=processes, **options
            )
        )
        for k in range(processes)
    ]
    assert [len(share) for share in shares] == [3] * processes
    for step, batch in enumerate(whole):
        for name in batch:
            parts = np.concatenate([share[step][name] for share in shares], axis=1)
            np.testing.assert_array_equal(parts, batch[name])
            assert shares[0][step][name].shape == (1, 8 // processes, 3)


def test_validation_stops_after_max_batches_and_checks_its_arguments():
    options = dict(seq_len=3, batch_size=2)
    found = list(validation_batches(np.arange(60), max_batches=2, **options))
    assert [b["inputs"][0, 0, 0] for b in found] == [0, 6]
    assert not list(validation_batches(np.arange(60), max_batches=0, **options))
    with pytest.raises(ValueError, match="batch_size=2 is not a multiple"):
        validation_batches(np.arange(60), max_batches=1, process_count=4, **options)
    with pytest.raises(ValueError, match="1 tokens hold none to predict"):
        validation_batches(np.arange(1), max_batches=1, **options)
