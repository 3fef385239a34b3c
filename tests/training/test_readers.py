"""Token files are mapped, and files that cannot be read say where and why."""

import hashlib
import json
import os
import sys
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        f"{path}: reading .parquet needs pyarrow; pip install -e '.[data]' "
        "in jaxckpt's checkout"
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
