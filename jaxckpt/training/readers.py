"""Find text and token files and read them, with one line of error for what is wrong.

Text (`.txt`, `.jsonl`, `.parquet`) becomes UTF-8 bytes, a token each; token files
(`.npy`, `.bin`) are mapped, not read.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxckpt.extras import install

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
TOKEN_SUFFIXES = (".npy", ".bin")
SEPARATOR = b"\0"  # between documents; no UTF-8 text file has reason to contain it
_VALIDATION_NAME = re.compile(r"(val|valid|validation|test|dev)([-_. ]|$)", re.I)


class DataError(ValueError):
    """Data that cannot be used: one line, naming the path and saying what to do."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True)
class File:
    """A file to read."""

    path: str
    key: bytes  # path relative to the folder it was found in
    named: bool  # given by the user, not found in a folder

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.path)[1].lower()

    @property
    def for_validation(self) -> bool:
        """Whether its name says so: ``val.txt``, ``test-00.jsonl``, ``dev_1.bin``."""
        return bool(_VALIDATION_NAME.match(os.path.basename(self.path)))


@dataclass(frozen=True)
class Source:
    """The unit of the split: a file, or a row of the only file."""

    key: bytes  # what the split hashes
    tokens: np.ndarray
    for_validation: bool = False  # by its file's name


def find_files(paths: Sequence[str]) -> list[File]:
    """The files that `paths` name or that are in the folders they name, each once."""
    allowed = TEXT_SUFFIXES + TOKEN_SUFFIXES
    found: dict[str, File] = {}  # by real path: a file named twice must not be on both
    for given in paths:  # sides of the split
        path = os.path.expanduser(given)
        with readable(path):
            os.stat(path)
        if os.path.isdir(path):
            files = walk(path, allowed)
            if not files:
                raise DataError(
                    f"{path}: no {_either(allowed)} file in this folder; "
                    f"give a folder or file that has data"
                )
        else:
            files = [File(path, os.fsencode(os.path.basename(path)), named=True)]
            if files[0].suffix not in allowed:
                raise DataError(
                    f"{path}: cannot read files named "
                    f"{files[0].suffix or 'without a suffix'}; convert it to "
                    f"{_either(allowed)}"
                )
        for file in files:
            found.setdefault(os.path.realpath(file.path), file)
    return list(found.values())


def walk(
    root: str,
    suffixes: Sequence[str],
    *,
    skip: frozenset[str] = frozenset(),
    strict: bool = True,
) -> list[File]:
    """The files below `root` with one of `suffixes`, sorted by relative path."""

    def fail(error: OSError) -> None:
        if strict:
            with readable(error.filename):
                raise error

    files, seen = [], set()
    for folder, subfolders, names in os.walk(root, onerror=fail, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:  # a link to a folder above it
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(set(subfolders) - skip)
        for name in names:
            path = os.path.join(folder, name)
            key = os.path.relpath(path, root).replace(os.sep, "/")
            file = File(path, os.fsencode(key), named=False)
            if file.suffix in suffixes:
                files.append(file)
    return sorted(files, key=lambda file: file.key)


def read_text_files(files: Sequence[File]) -> tuple[int, list[Source]]:
    """How many files hold text, and their sources: the rows when it is only one."""
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    documents: list[tuple[File, list[bytes]]] = []
    for file in files:
        with readable(file.path):
            rows = [row for row in readers[file.suffix](file.path) if row]
        if rows:
            documents.append((file, rows))
        elif file.named:
            raise DataError(f"{file.path}: empty; give a file with text")
    if len(documents) == 1:
        sources = [text_source(row, row) for row in documents[0][1]]
    else:
        sources = [
            text_source(file.key, SEPARATOR.join(rows), file.for_validation)
            for file, rows in documents
        ]
    return len(documents), sources


def text_source(key: bytes, content: bytes, for_validation: bool = False) -> Source:
    """A source of text, a token per byte."""
    return Source(key, np.frombuffer(content, np.uint8), for_validation)


def _read_txt(path: str) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        content = stream.read()
    nul = content.find(SEPARATOR)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if nul < 0 or error.start < nul:
            raise DataError(
                f"{path}: not UTF-8 text (byte 0x{content[error.start]:02x} at offset "
                f"{error.start}); convert it to UTF-8 or leave it out"
            ) from error
    if nul >= 0:
        raise DataError(
            f"{path}: binary content (NUL byte at offset {nul}); convert it to UTF-8 "
            f"text or leave it out"
        )
    yield content


def _read_jsonl(path: str) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                reason = str(error)
                if isinstance(error, json.JSONDecodeError):  # its line number is ours
                    reason = f"{error.msg}: column {error.colno}"
                raise DataError(
                    f"{where}: not valid JSON ({reason}); repair or delete the line"
                ) from error
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise DataError(
                    f'{where}: no string field "text"; write one object per line, '
                    f'such as {{"text": "..."}}'
                )
            yield _encode(where, row["text"])


def _read_parquet(path: str) -> Iterator[bytes]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(
            f"{path}: reading .parquet needs pyarrow; {install('data')}"
        ) from error
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if "text" not in schema.names:
                raise DataError(
                    f'{path}: no column "text" among {", ".join(schema.names)}; '
                    f"rename the column that holds the text"
                )
            kind = schema.field("text").type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise DataError(
                    f'{path}: column "text" holds {kind}; write it as string'
                )
            for batch in file.iter_batches(columns=["text"]):
                for text in batch["text"].to_pylist():
                    number += 1
                    if text is None:
                        raise DataError(f"{path}: row {number} is null; drop the row")
                    yield _encode(f"{path}: row {number}", text)
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: not a valid Parquet file ({error}); write it again"
        ) from error


def _encode(where: str, text: str) -> bytes:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise DataError(
            f"{where}: text is not valid Unicode (character {error.start}); repair it"
        ) from error
    if SEPARATOR in content:
        raise DataError(
            f"{where}: text holds a NUL character, which separates documents; remove it"
        )
    return content


def token_dtype(vocab_size: int) -> np.dtype:
    """Of the tokens of a .bin file."""
    return np.dtype("<u4" if vocab_size > 2**16 else "<u2")


def read_token_file(file: File, vocab_size: int) -> Source:
    """Maps a token file and checks its tokens against the vocabulary."""
    path = file.path
    with readable(path):
        if file.suffix == ".bin":
            tokens = _map_bin(path, vocab_size)
        else:
            tokens = _map_npy(path)
    if file.named and not len(tokens):
        raise DataError(f"{path}: empty; give a file with tokens")
    if len(tokens) and (largest := int(tokens.max())) >= vocab_size:
        raise DataError(
            f"{path}: token {largest} at index {int(tokens.argmax())} is not below "
            f"--vocab-size={vocab_size} (tokens are {tokens.dtype.name}); use "
            f"--vocab-size={largest + 1} or more"
        )
    if len(tokens) and (smallest := int(tokens.min())) < 0:
        raise DataError(
            f"{path}: token {smallest} at index {int(tokens.argmin())} is negative; "
            f"write tokens from 0 on"
        )
    return Source(file.key, tokens, file.for_validation)


def _map_bin(path: str, vocab_size: int) -> np.ndarray:
    dtype, size = token_dtype(vocab_size), os.stat(path).st_size
    if size % dtype.itemsize:
        raise DataError(
            f"{path}: {size} bytes is not a whole number of {dtype.name} tokens, as "
            f"--vocab-size={vocab_size} implies; write the file again as {dtype.name}"
        )
    if not size:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _map_npy(path: str) -> np.ndarray:
    if not os.stat(path).st_size:
        return np.empty(0, np.uint16)
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise DataError(
            f"{path}: not a valid .npy file ({error}); write it again with numpy.save"
        ) from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            f"{path}: holds {tokens.dtype.name} of shape {tokens.shape}; save a "
            f"1-D integer array"
        )
    return tokens


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Turns an error of the operating system into one line about `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: does not exist; check the path") from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); check the path and "
            f"its permissions"
        ) from error


def _either(suffixes: Sequence[str]) -> str:
    return ", ".join(suffixes[:-1]) + f" or {suffixes[-1]}"
