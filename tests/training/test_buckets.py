"""Documents batched by length: which, in what order, and runs that switch by it."""

import dataclasses
import io
import json
import re
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxckpt.models.presets import ConfigError
from jaxckpt.training import loop
from jaxckpt.training.buckets import Order, bucket_batches, make_buckets
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.divisible import check_divisible
from jaxckpt.training.snapshot import SnapshotError

pytestmark = pytest.mark.xdist_group("buckets")  # what is made once is shared

# ---------------------------------------------------------------- order


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
def test_every_bucket_comes_by_its_share_and_evenly(counts):
    order, total = Order(counts), sum(counts)
    seen = [0] * len(counts)
    for batch in range(2 * total):
        bucket, number = order[batch]
        assert number == seen[bucket]  # none left out, none twice
        seen[bucket] += 1
        for count, done in zip(counts, seen, strict=True):
            assert abs(done - count / total * (batch + 1)) < len(counts) / 2 + 0.5
    assert seen == [2 * count for count in counts]


# ---------------------------------------------------------------- examples

DOCUMENTS = st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\0", b"x")))


@settings(deadline=None)
@given(DOCUMENTS.filter(any), st.sets(st.integers(1, 20), min_size=1, max_size=3))
def test_every_token_is_predicted_once_in_the_shortest_bucket(documents, lengths):
    lengths = sorted(lengths)
    text = np.frombuffer(b"\0".join(documents), np.uint8)
    buckets = make_buckets(text, lengths)
    wanted = Counter()
    for document in documents:
        for start in range(0, len(document), lengths[-1]):
            source = document[start : start + lengths[-1]]
            target = (document + b"\0")[start + 1 : start + 1 + len(source)]
            bucket = next(i for i, n in enumerate(lengths) if len(source) <= n)
            wanted[bucket, source, target] += 1
    found = Counter()
    for bucket, count in enumerate(buckets.counts):
        for number in range(count):
            source, target = buckets.example(bucket, number)
            found[bucket, bytes(source), bytes(target)] += 1
    assert found == wanted


# ---------------------------------------------------------------- batches

# The letters name the document: 5 of 3 tokens, 2 of 7, none of 8 to 15, 3 of 16.
TEXT = [3 * letter for letter in "abcde"] + [7 * letter for letter in "fg"]
TEXT += [16 * letter for letter in "hij"]
BUCKETS = make_buckets(
    np.frombuffer("\0".join(TEXT).encode(), np.uint8), [4, 7, 12, 16]
)


def letters(batch) -> list[str]:
    return [chr(token) for token in batch["inputs"][..., 0].ravel()]


def take(count, **options):
    with bucket_batches(BUCKETS, seed=1, **options) as stream:
        return [next(stream) for _ in range(count)]


def test_k2_a_batch_is_as_long_as_its_bucket_and_padding_weighs_nothing():
    assert BUCKETS.counts == (5, 2, 0, 3)
    told = "5 of up to 4 tokens, 2 of up to 7 tokens, 0 of up to 12 tokens, 3 of up to"
    assert told in BUCKETS.description and BUCKETS.description.endswith(
        f"{1 - 77 / 82:.0%} is padding"
    )
    for batch in take(10, batch_size=2):
        length = batch["inputs"].shape[-1]
        assert {array.shape for array in batch.values()} == {(1, 2, length)}
        for row in range(2):
            token = batch["inputs"][0, row, 0]
            size = next(len(text) for text in TEXT if ord(text[0]) == token)
            assert length == next(n for n in BUCKETS.lengths if n >= size)
            filled = (np.arange(length) < size).astype(int)
            np.testing.assert_array_equal(batch["weights"][0, row], filled)
            np.testing.assert_array_equal(batch["inputs"][0, row], filled * token)
            last = np.arange(length) < size - 1  # then the document ends: a 0
            np.testing.assert_array_equal(batch["targets"][0, row], last * token)


def test_every_document_is_seen_equally_often_in_an_order_of_its_own():
    seen = [letters(batch) for batch in take(20, batch_size=3)]  # two cycles of ten
    for cycle in seen[:10], seen[10:]:
        assert set(Counter(letter for batch in cycle for letter in batch).values()) == {
            3
        }
    short = "".join(letter for batch in seen for letter in batch if letter in "abcde")
    epochs = [short[start : start + 5] for start in range(0, 30, 5)]
    assert {"".join(sorted(epoch)) for epoch in epochs} == {"abcde"}
    assert len(set(epochs)) > 3


WHOLE = [letters(batch) for batch in take(40, batch_size=4)]


@settings(max_examples=30, deadline=None)
@given(
    first=st.integers(0, 35),
    accumulate=st.sampled_from([1, 2, 4]),
    processes=st.sampled_from([1, 2, 4]),
)
def test_any_position_goes_on_as_if_uninterrupted(first, accumulate, processes):
    if 4 % (accumulate * processes):
        return
    options = dict(batch_size=4, accumulate=accumulate, position=4 * first)
    for batches in zip(
        *(
            take(3, process_index=index, process_count=processes, **options)
            for index in range(processes)
        ),
        strict=True,
    ):
        together = np.concatenate([batch["inputs"] for batch in batches], axis=1)
        assert letters({"inputs": together}) == WHOLE[first]
        first += 1


def test_the_stream_ends_and_checks_its_arguments():
    with bucket_batches(
        BUCKETS, batch_size=2, seed=0, position=4, num_sequences=6
    ) as stream:
        assert len(list(stream)) == 3 and stream.position == 10
    for wrong in dict(position=3), dict(num_sequences=5):
        with pytest.raises(ValueError, match="must be multiples of batch_size=2"):
            bucket_batches(BUCKETS, batch_size=2, seed=0, **wrong)
    with pytest.raises(ValueError, match="is not a multiple of accumulate"):
        bucket_batches(BUCKETS, batch_size=2, accumulate=4, seed=0)


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "fields, problem",
    [
        (dict(seq_len=12), "the longest bucket is of 16 tokens, and --seq-len=12 is"),
        (dict(policy="full"), "--policy-schedule is in place of --policy=full"),
        (dict(batch_size=8), None),
        (dict(seq_len=16), None),
    ],
)
def test_lengths_and_other_flags(fields, problem):
    def make():
        return TrainConfig(policy_schedule="auto:length:8=none,16=full", **fields)

    if problem is None:
        assert make().sequence_length == 16
        return
    with pytest.raises(ConfigError, match=problem):
        make()


def test_k2_every_length_is_divided():
    config = TrainConfig(
        policy_schedule="auto:length:7=none,16=full", sequence_parallel=True
    )
    told = "the bucket of 7 tokens does not divide over tensor = 2; use 8"
    with pytest.raises(ConfigError, match=told):
        check_divisible(config, {"tensor": 2})


# ---------------------------------------------------------------- runs

TWO = "auto:length:8={},16={}"


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """300 documents of 1 to 40 letters, more short ones than long ones."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "documents.jsonl"
    rows = ["abcdefgh" * 5] * 20 + ["abcdefgh"[: 1 + n % 8] for n in range(280)]
    rng.shuffle(rows)
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def run(make_config, place, documents, tmp_path_factory):
    """``(policies, workdir=None, mesh, **fields) -> records of metrics.jsonl``."""

    def train_by_length(policies, workdir=None, mesh="data:1", **fields):
        workdir = workdir or tmp_path_factory.mktemp("run")
        workdir.mkdir(exist_ok=True)
        defaults = dict(steps=14, snapshot_every=0, data=(str(documents),))
        config = dataclasses.replace(
            make_config(),
            policy_schedule=TWO.format(*policies),
            workdir=str(workdir),
            **{**defaults, **fields},
        )
        loop.train(config, place(mesh), [], Console(file=io.StringIO()))
        return [json.loads(line) for line in (workdir / "metrics.jsonl").open()]

    return train_by_length


@pytest.fixture(scope="module")
def under_none(compile_fast, run):
    return run(["none", "none"])


def losses(records):
    return [record["loss"] for record in records]


def test_k2_lengths_run_under_their_own_policies_and_recompile_nothing(
    run, under_none, compilations, tmp_path
):
    policies = ["none", "full"]
    found = run(policies, tmp_path, eval_every=5, eval_batches=1)
    np.testing.assert_allclose(losses(found), losses(under_none), rtol=1e-6, atol=0)
    used = [(record["sequence_length"], record["policy"]) for record in found]
    assert set(used) == set(zip((8, 16), policies, strict=True))
    assert len(compilations) == 14 and compilations[0] >= 2
    assert set(compilations) == {compilations[0]}
    # Each receipt is of its own shapes; the run's is that of the longest.
    receipts = {
        length: json.loads((tmp_path / f"receipt-length-{length}.json").read_text())
        for length in (8, 16)
    }
    assert [receipt["requested"] for receipt in receipts.values()] == policies
    forward = [r["step"]["flops"]["forward"] for r in receipts.values()]
    assert 0 < forward[0] < forward[1]
    assert json.loads((tmp_path / "receipt.json").read_text()) == receipts[16]
    assert {path.name for path in tmp_path.glob("receipt*")} == {
        "receipt.json", *(f"receipt-length-{length}.json" for length in receipts)
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_killed_goes_on_as_it_would_have(run, under_none, killed_at, tmp_path):
    with killed_at(9):
        run(["full", "none"], tmp_path, snapshot_every=5)
    with pytest.raises(SnapshotError, match=r"in batches of 8 .* in batches of 4;"):
        run(["none", "none"], tmp_path, resume=True, batch_size=4)
    found = run(["none", "full"], tmp_path, resume=True, accumulate=2)
    np.testing.assert_allclose(losses(found), losses(under_none), rtol=1e-6, atol=0)
    for record, straight in zip(found, under_none, strict=True):
        assert record["sequence_length"] == straight["sequence_length"]


def test_groupings_that_would_move_the_state_at_every_step_are_refused(run, tmp_path):
    told = "8=none and 16=every:2 group the layers' weights otherwise"
    with pytest.raises(ConfigError, match=told) as caught:
        run(["none", "every:2"], tmp_path)
    (line,) = str(caught.value).splitlines()
    assert line.endswith("or --no-scan-layers")
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_token_files_have_no_documents(run, tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(999) % 250)
    with pytest.raises(ConfigError, match="token files do not say where one ends"):
        run(["none", "none"], tmp_path, data=(str(tmp_path / "tokens.npy"),))


def test_no_program_is_compiled_for_a_length_that_no_document_has(
    run, monkeypatch, tmp_path
):
    path = tmp_path / "one.txt"
    path.write_text("abcdefghijklmnop" * 100)  # one document, in pieces of 16

    def inspect(config, placement, programs, **options):
        raise ConfigError(f"asked for {[*programs]}")

    monkeypatch.setattr(loop, "inspect_schedule", inspect)
    with pytest.raises(ConfigError, match=re.escape("asked for ['16=full']")):
        run(["none", "full"], tmp_path / "run", data=(str(path),))


@pytest.mark.slow
def test_lengths_on_a_mesh(run, under_none):
    assert len(jax.devices()) >= 4
    found = run(["full", "save:context"], mesh="data:2,fsdp:2")
    np.testing.assert_allclose(losses(found), losses(under_none), rtol=1e-5, atol=0)
