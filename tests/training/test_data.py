"""Tokens from every kind of file, and batches that can start anywhere."""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt.training.corpus import DataError, load_corpus
from jaxckpt.training.data import batches, validation_batches

NOT_ROOT = 65534


def load(*paths, vocab_size=256, seq_len=4):
    return load_corpus([str(p) for p in paths], vocab_size=vocab_size, seq_len=seq_len)


def error(*paths, **options) -> str:
    with pytest.raises(DataError) as caught:
        load(*paths, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def documents(tokens) -> list[bytes]:
    return bytes(tokens).split(b"\0")


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def hash_of(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


# ---------------------------------------------------------------- text


def test_the_default_corpus_is_the_standard_library_without_its_tests():
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    expected = []
    for path in root.rglob("*.py"):
        content = path.read_bytes()
        if content and not left_out & set(path.relative_to(root).parts):
            try:
                content.decode()
            except UnicodeDecodeError:
                continue
            expected.append(content)

    corpus = load_corpus([], vocab_size=256, seq_len=512)
    train, validation = documents(corpus.train), documents(corpus.validation)
    assert len(corpus.train) > 5_000_000
    assert 0.02 < len(validation) / len(train + validation) < 0.09
    assert sorted(train + validation) == sorted(expected)  # so none holds a NUL
    assert corpus.train.dtype == corpus.validation.dtype == np.uint8
    assert corpus.bytes_per_token == 1.0
    major, minor = sys.version_info[:2]
    assert corpus.description == (
        f"Python {major}.{minor} standard library: "
        f"{len(expected)} files, {sum(map(len, expected)) / 1e6:.1f} MB"
    )


def test_the_default_corpus_skips_what_is_not_text(tmp_path, monkeypatch):
    good = [f"good{i}.py" for i in range(4)] + ["package/module.py"]
    bad = {"nul.py": b"x\0", "latin.py": b"\xff", "empty.py": b"", "README": b"x"}
    skipped = ["site-packages", "dist-packages", "test", "tests", "__pycache__"]
    bad |= {f"package/{folder}/a.py": b"x" for folder in skipped}
    for name, content in {**bad, **{name: name.encode() for name in good}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    (tmp_path / "stdlib").symlink_to(tmp_path)
    corpus = load()
    found = documents(corpus.train) + documents(corpus.validation)
    assert sorted(found) == [name.encode() for name in good]
    (tmp_path / "stdlib").unlink()
    assert error() == (
        f"{tmp_path}/stdlib: no Python sources here; name your own text files"
    )


def test_one_text_file_gives_its_last_twentieth(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(65, 85)) * 10)  # 200 bytes
    corpus = load(path)
    assert (len(corpus.train), len(corpus.validation)) == (190, 10)
    assert bytes(corpus.train) + bytes(corpus.validation) == path.read_bytes()
    assert corpus.description == f"{path}: 1 file, 200 bytes"


def test_validation_of_one_file_has_at_least_one_window(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 50)
    assert len(load(path, seq_len=9).validation) == 10
    assert len(load(path, seq_len=24).validation) == 25


def test_files_are_split_by_the_hash_of_their_relative_path(tmp_path):
    for root in "one", "two":
        for i in range(100):
            path = tmp_path / root / f"folder{i % 3}" / f"{i:03}.TXT"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"document {i:03}")
    keys = {i: f"folder{i % 3}/{i:03}.TXT" for i in range(100)}
    expected = [i for i in keys if hash_of(keys[i]) < 2**64 // 20]
    assert expected == [
        12,
        38,
        45,
        49,
        63,
        75,
        83,
        94,
    ]  # pinned: a new hash would mix old runs' parts
    for root in "one", "two":
        corpus = load(tmp_path / root)
        held_out = sorted(int(d[-3:]) for d in documents(corpus.validation))
        train = [int(d[-3:]) for d in documents(corpus.train)]
        assert held_out == expected
        in_path_order = sorted(set(keys) - set(expected), key=lambda i: keys[i])
        assert train == in_path_order
        num_train = 100 - len(expected)
        assert len(corpus.train) == num_train * len("document 000") + num_train - 1


def test_few_files_still_give_validation_one_window(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name * 10)
    by_hash = sorted("abcd", key=lambda name: hash_of(f"{name}.txt"))
    assert documents(load(tmp_path, seq_len=9).validation) == [by_hash[0].encode() * 10]
    two = sorted(name.encode() * 10 for name in by_hash[:2])
    assert documents(load(tmp_path, seq_len=10).validation) == two


def test_a_file_given_twice_is_read_once(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 20)
    (tmp_path / "loop").symlink_to(tmp_path)
    corpus = load(tmp_path, tmp_path / "a.txt", tmp_path / "loop" / "b.txt")
    assert len(corpus.train) == len(corpus.validation) == 20


def test_links_to_folders_are_followed(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name * 20)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b")
    corpus = load(tmp_path / "a")
    assert {bytes(corpus.train)[:1], bytes(corpus.validation)[:1]} == {b"a", b"b"}


def test_jsonl_is_split_by_row_and_the_same_row_never_on_both_sides(tmp_path):
    texts = [f"row {i:03} é" for i in range(200)]
    corpus = load(write_jsonl(tmp_path / "a.jsonl", texts + texts))
    expected = [text for text in texts if hash_of(text) < 2**64 // 20]
    assert 0 < len(expected) < 30
    assert documents(corpus.validation) == [t.encode() for t in expected * 2]
    rest = [text for text in texts if text not in expected]
    assert documents(corpus.train) == [t.encode() for t in rest * 2]


def test_several_jsonl_files_are_split_by_file(tmp_path):
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [name * 3, "", name * 4])
    first = min("ab", key=lambda name: hash_of(f"{name}.jsonl"))
    validation = documents(load(tmp_path).validation)
    assert validation == [first.encode() * 3, first.encode() * 4]


def test_parquet_gives_the_same_tokens_as_jsonl(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    texts = [f"row {i:03} é" for i in range(100)]
    table = pa.table({"id": list(range(100)), "text": texts})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    rows = load(write_jsonl(tmp_path / "a.jsonl", texts))
    columns = load(tmp_path / "a.parquet")
    assert bytes(columns.train) == bytes(rows.train)
    assert bytes(columns.validation) == bytes(rows.validation)
    assert len(documents(columns.train)) + len(documents(columns.validation)) == 100


# ---------------------------------------------------------------- token files


@pytest.mark.parametrize(
    "vocab_size, dtype", [(65_536, np.uint16), (65_537, np.uint32)]
)
def test_bin_is_mapped_and_its_width_follows_the_vocabulary(
    tmp_path, vocab_size, dtype
):
    path = tmp_path / "a.bin"
    tokens = np.arange(65_436, 65_536).astype(dtype)
    path.write_bytes(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    corpus = load(path, vocab_size=vocab_size)
    assert corpus.train.dtype == dtype
    assert isinstance(corpus.train, np.memmap) and isinstance(
        corpus.validation, np.memmap
    )
    np.testing.assert_array_equal(corpus.train, tokens[:95])
    np.testing.assert_array_equal(corpus.validation, tokens[95:])
    assert corpus.bytes_per_token is None
    assert corpus.description == f"{path}: 1 file, 100 tokens"


def test_npy_is_mapped(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(40, dtype=np.int64))
    corpus = load(tmp_path, vocab_size=40)
    assert isinstance(corpus.train, np.memmap)
    np.testing.assert_array_equal(corpus.train, np.arange(35))
    np.testing.assert_array_equal(corpus.validation, np.arange(35, 40))


def test_token_files_are_joined_without_separator_in_the_smallest_type(tmp_path):
    np.save(tmp_path / "a.npy", np.full(10, 1, np.int64))
    np.save(tmp_path / "b.npy", np.full(10, 2, np.uint64))
    np.full(10, 3, "<u2").tofile(tmp_path / "c.bin")
    corpus = load(tmp_path, vocab_size=4)
    names = {1: "a.npy", 2: "b.npy", 3: "c.bin"}
    held_out = min(names, key=lambda token: hash_of(names[token]))
    assert set(corpus.validation.tolist()) == {held_out}
    expected = [token for token in names if token != held_out for _ in range(10)]
    assert corpus.train.tolist() == expected
    assert corpus.train.dtype == np.uint16


def test_a_part_that_is_one_token_file_stays_mapped(tmp_path):
    for name in "ab":
        np.full(10, 1, "<u2").tofile(tmp_path / f"{name}.bin")
    corpus = load(tmp_path)
    assert isinstance(corpus.train, np.memmap)
    assert isinstance(corpus.validation, np.memmap)


# ---------------------------------------------------------------- errors


def test_missing_path(tmp_path):
    path = tmp_path / "none.txt"
    assert error(path) == f"{path}: does not exist; check the path"


def test_unreadable_path():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = os.path.join(folder, "a.txt")
        with open(path, "w") as file:
            file.write("x" * 100)
        os.chmod(path, 0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(NOT_ROOT)
        try:
            for given in path, folder:
                assert error(given) == (
                    f"{path}: cannot be read (Permission denied); "
                    f"check the path and its permissions"
                )
        finally:
            os.seteuid(user)


def test_empty_file_and_empty_folder(tmp_path):
    (tmp_path / "notes.md").write_text("skipped")
    assert error(tmp_path) == (
        f"{tmp_path}: no .txt, .jsonl, .parquet, .npy or .bin file in this folder; "
        f"give a folder or file that has data"
    )
    path = tmp_path / "a.txt"
    path.touch()
    assert error(path) == f"{path}: empty; give a file with text"
    assert error(tmp_path) == f"{tmp_path}: only empty files; give files with data"
    (tmp_path / "b.txt").write_text("b" * 100)
    assert bytes(load(tmp_path).train) == b"b" * 95
    for name in "c.bin", "c.npy":
        path = tmp_path / name
        path.touch()
        assert error(path) == f"{path}: empty; give a file with tokens"


def test_unknown_suffix(tmp_path):
    for name, shown in ("a.csv", ".csv"), ("README", "without a suffix"):
        path = tmp_path / name
        path.write_text("x" * 100)
        assert error(path) == (
            f"{path}: cannot read files named {shown}; "
            f"convert it to .txt, .jsonl, .parquet, .npy or .bin"
        )


@pytest.mark.parametrize(
    "content, message",
    [
        (
            b"abc\xff\0",
            "not UTF-8 text (byte 0xff at offset 3); convert it to UTF-8 or leave it "
            "out",
        ),
        (
            b"ab\0c\xff",
            "binary content (NUL byte at offset 2); convert it to UTF-8 text or leave "
            "it out",
        ),
    ],
)
def test_binary_text_names_the_first_bad_byte(tmp_path, content, message):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert error(path) == f"{path}: {message}"


@pytest.mark.parametrize(
    "line, message",
    [
        (
            b'{"text": "trunca',
            "not valid JSON (Unterminated string starting at: column 10); "
            "repair or delete the line",
        ),
        (b'{"text": "\xff"}', "not valid JSON ('utf-8' codec can't decode byte 0xff"),
        (b'{"body": "x"}', 'no string field "text"; write one object per line'),
        (b'{"text": 3}', 'no string field "text"; write one object per line'),
        (b'["text"]', 'no string field "text"; write one object per line'),
        (b'{"text": "a\\u0000"}', "text holds a NUL character, which separates"),
        (b'{"text": "a\\ud800"}', "text is not valid Unicode (character 1); repair it"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line)
    assert error(path).startswith(f"{path}:3: {message}")


def test_bad_parquet(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), path)
    assert error(path).startswith(f'{path}: no column "text" among id, body; rename')
    pq.write_table(pa.table({"text": [1]}), path)
    assert error(path) == f'{path}: column "text" holds int64; write it as string'
    pq.write_table(pa.table({"text": ["x", None]}), path)
    assert error(path) == f"{path}: row 2 is null; drop the row"
    path.write_bytes(b"not parquet, though long enough")
    assert error(path).startswith(f"{path}: not a valid Parquet file (")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert error(path) == (
        f"{path}: reading .parquet needs pyarrow; pip install 'jaxckpt[data]'"
    )


def test_text_needs_256_tokens(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    needs = "text is read as bytes, which do not fit --vocab-size=255; use --vocab-size"
    assert error(path, vocab_size=255) == f"{path}: {needs}=256 or more"
    assert needs in error(vocab_size=255)
    assert len(load(path, vocab_size=256).train) == 95


def test_tokens_outside_the_vocabulary(tmp_path):
    path = tmp_path / "a.bin"
    np.array([7] * 20 + [99, 300], "<u2").tofile(path)
    assert error(path, vocab_size=300) == (
        f"{path}: token 300 at index 21 is not below --vocab-size=300 "
        f"(tokens are uint16); use --vocab-size=301 or more"
    )
    assert len(load(path, vocab_size=301).train) == 17
    np.save(tmp_path / "b.npy", np.array([1, -2, 3]))
    assert error(tmp_path / "b.npy") == (
        f"{tmp_path / 'b.npy'}: token -2 at index 1 is negative; write tokens from 0 on"
    )


def test_malformed_token_files(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(11))
    assert error(path, vocab_size=300) == (
        f"{path}: 11 bytes is not a whole number of uint16 tokens, as "
        f"--vocab-size=300 implies; write the file again as uint16"
    )
    path.write_bytes(bytes(14))
    assert "14 bytes is not a whole number of uint32" in error(path, vocab_size=70_000)
    path = tmp_path / "a.npy"
    for array in np.zeros((2, 3), np.int32), np.zeros(6, np.float32):
        np.save(path, array)
        assert error(path) == (
            f"{path}: holds {array.dtype} of shape {array.shape}; "
            f"save a 1-D integer array"
        )
    np.save(path, np.zeros(100, np.int32))
    for bad in path.read_bytes()[:-8], b"garbage\nover two lines":
        path.write_bytes(bad)
        assert error(path).startswith(f"{path}: not a valid .npy file (")


def test_text_and_tokens_cannot_be_mixed(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    np.save(tmp_path / "b.npy", np.zeros(100, np.int32))
    assert error(tmp_path) == (
        f"{tmp_path}/a.txt: text cannot be mixed with token files "
        f"({tmp_path}/b.npy); give one kind only"
    )


def test_too_short(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    assert error(path, seq_len=50) == (
        f"{path}: 100 tokens cannot be split into 51 to train on and 51 to validate "
        f"on, as --seq-len=50 needs; add data or use --seq-len=49 or less"
    )
    path.write_text("xyz")
    assert error(path, seq_len=50).endswith("as --seq-len=50 needs; add data")


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_the_suggested_seq_len_is_the_largest_that_works(sizes):
    with tempfile.TemporaryDirectory() as folder:
        for i, size in enumerate(sizes):
            with open(os.path.join(folder, f"{i}.txt"), "w") as file:
                file.write("x" * size)
        message = error(folder, seq_len=1000)
        if "--seq-len=" not in message.split(";")[1]:
            assert "as --seq-len=1 needs" in error(folder, seq_len=1)
            return
        best = int(message.split(";")[1].split("--seq-len=")[1].split()[0])
        corpus = load(folder, seq_len=best)
        assert min(len(corpus.train), len(corpus.validation)) > best
        assert f"as --seq-len={best + 1} needs" in error(folder, seq_len=best + 1)


def test_a_newline_in_a_path_does_not_break_the_line(tmp_path):
    assert error(tmp_path / "a\nb.txt") == (
        f"{tmp_path}/a b.txt: does not exist; check the path"
    )


# ---------------------------------------------------------------- named for a part


@pytest.mark.parametrize(
    "name",
    ["val.txt", "valid-1.txt", "validation_00.txt", "Test.v2.txt", "dev 3.txt"],
)
def test_files_named_for_validation_are_the_validation_part(tmp_path, name):
    for other in "a.txt", "train.txt", "train-0.txt", "book.txt", "value.txt":
        (tmp_path / other).write_text(f"from {other}")
    for other in "testing.txt", "developer.txt", "invalid.txt", "my-val.txt":
        (tmp_path / other).write_text(f"from {other}")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / name).write_text("held out")
    corpus = load(tmp_path)
    assert bytes(corpus.validation) == b"held out"
    assert len(documents(corpus.train)) == 9
    assert b"held out" not in bytes(corpus.train)


def test_token_files_named_for_validation(tmp_path):
    for i, name in enumerate(["train_0.bin", "val_0.bin", "train_1.bin", "val_1.bin"]):
        np.full(6, i, "<u2").tofile(tmp_path / name)
    corpus = load(tmp_path)
    assert corpus.validation.tolist() == [1] * 6 + [3] * 6
    assert corpus.train.tolist() == [0] * 6 + [2] * 6


def test_given_files_named_for_validation_keep_their_rows_together(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", [f"row {i}" for i in range(50)])
    held_out = write_jsonl(tmp_path / "test.jsonl", ["one", "two", "three"])
    corpus = load(train, held_out)
    assert documents(corpus.validation) == [b"one", b"two", b"three"]
    assert len(documents(corpus.train)) == 50


def test_names_that_leave_one_part_empty_do_not_count(tmp_path):
    for names in ["train-0.txt", "train-1.txt"], ["val.txt", "test.txt"]:
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in names:
            (folder / name).write_text(f"from {name}")
        corpus = load(folder)
        parts = documents(corpus.train) + documents(corpus.validation)
        assert sorted(parts) == sorted(f"from {name}".encode() for name in names)
    (tmp_path / "train-0.txt" / "val.txt").write_text("")  # empty, so not there
    assert len(load(tmp_path / "train-0.txt").validation) == len("from train-0.txt")


def test_too_short_a_part_by_name(tmp_path):
    (tmp_path / "train.txt").write_text("x" * 100)
    (tmp_path / "val.txt").write_text("y" * 10)
    assert error(tmp_path, seq_len=10) == (
        f"{tmp_path}: 10 tokens in files named for validation and 100 in the others; "
        "--seq-len=10 needs 11 in each"
    )
    assert len(load(tmp_path, seq_len=9).validation) == 10


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


def test_the_modules_do_not_import_jax():
    program = (
        "import sys, jaxckpt.training.corpus\n"
        "print([name for name in ('jax', 'grain', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.stdout == b"[]\n"


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
