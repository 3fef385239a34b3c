"""Tokens from every kind of file, split into training and validation."""

import hashlib
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from jaxckpt.training.corpus import DataError, load_corpus

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


def test_the_module_does_not_import_jax():
    program = (
        "import sys, jaxckpt.training.corpus\n"
        "print([name for name in ('jax', 'grain', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.stdout == b"[]\n"
