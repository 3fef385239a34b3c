"""From files to tokens: read text or token files and split off a validation part.

Text (`.txt`, `.jsonl`, `.parquet`) is read as UTF-8 bytes, one token per byte, with a
0 byte between documents. Token files (`.npy`, `.bin`) are mapped, not read. Without any
path the corpus is the text of the Python standard library, which is on every machine.

The split depends on names and contents only, never on the machine: a file goes to
validation when the hash of its path, relative to the folder it was found in, falls in
the lowest twentieth. A single .jsonl or .parquet file is split by the hash of each row;
one single document, or one token file, gives its last twentieth.
"""

import contextlib
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
TOKEN_SUFFIXES = (".npy", ".bin")
VALIDATION_SHARE = 20  # one file, row or token in so many
SEPARATOR = b"\0"  # between documents; no UTF-8 text file has reason to contain it
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "__pycache__")
)


class DataError(ValueError):
    """Data that cannot be used: one line, naming the path and saying what to do."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens to validate on.

    A part that comes from one token file is memory-mapped; several token files are
    joined in memory, so put a corpus larger than that in one file.
    """

    train: np.ndarray  # [tokens], uint8 for text
    validation: np.ndarray  # [tokens]
    bytes_per_token: float | None
    """1.0 for text, None for token files, whose tokenizer is unknown here."""
    description: str
    """For people: `Python 3.11 standard library: 612 files, 11.2 MB`."""


@dataclass(frozen=True)
class _File:
    path: str
    key: bytes  # path relative to the folder it was found in
    named: bool  # given by the user, not found in a folder

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.path)[1].lower()


@dataclass(frozen=True)
class _Source:
    """The unit of the split: a file, or a row of the only file."""

    key: bytes  # what the split hashes
    tokens: np.ndarray


def load_corpus(paths: Sequence[str], *, vocab_size: int, seq_len: int) -> Corpus:
    """Reads `paths` into train and validation tokens.

    Args:
      paths: files, or folders that are searched recursively for .txt, .jsonl, .parquet,
        .npy and .bin; other files in folders are skipped, and so are empty ones. Empty:
        the Python standard library. `.jsonl` holds an object with a string "text" per
        line, `.parquet` a column "text", `.npy` a 1-D integer array, `.bin` raw
        little-endian uint16, or uint32 when `vocab_size` is above 65,536.
      vocab_size: every token must be below it; text needs 256.
      seq_len: both parts must hold at least one window of `seq_len + 1` tokens. In a
        corpus so small that a twentieth of its files is less than one window, further
        files go to validation until it has one.

    Raises:
      DataError: for anything that cannot be read or used.
    """
    if not paths:
        name = f"Python {'.'.join(platform.python_version_tuple()[:2])}"
        name += " standard library"
        _check_text_vocabulary(name, vocab_size)
        sources = _standard_library()
        num_files, text = len(sources), True
    else:
        name = _listing([str(path) for path in paths])
        files = _find_files(paths)
        text = _is_text(files)
        if text:
            _check_text_vocabulary(files[0].path, vocab_size)
            num_files, sources = _read_text_files(files, name)
        else:
            sources = [_read_token_file(file, vocab_size) for file in files]
            sources = [source for source in sources if len(source.tokens)]
            num_files = len(sources)
    if not sources:
        raise DataError(f"{name}: only empty files; give files with data")
    train, validation = _split(
        sources,
        separator=np.frombuffer(SEPARATOR if text else b"", np.uint8),
        dtype=np.dtype(np.uint8) if text else _token_dtype(vocab_size),
        needed=seq_len + 1,
        name=name,
    )
    total = sum(len(source.tokens) for source in sources)
    size = _megabytes(total) if text else f"{total:,} tokens"
    count = "1 file" if num_files == 1 else f"{num_files:,} files"
    return Corpus(
        train=train,
        validation=validation,
        bytes_per_token=1.0 if text else None,
        description=f"{name}: {count}, {size}",
    )


def _standard_library() -> list[_Source]:
    root = sysconfig.get_path("stdlib")
    sources = []
    for file in _walk(root, (".py",), skip=_NOT_STDLIB, strict=False):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            with open(file.path, "rb") as stream:
                content = stream.read()
            content.decode()
            if content and SEPARATOR not in content:
                sources.append(_text_source(file.key, content))
    if not sources:
        raise DataError(f"{root}: no Python sources here; name your own text files")
    return sources


def _find_files(paths: Sequence[str]) -> list[_File]:
    allowed = TEXT_SUFFIXES + TOKEN_SUFFIXES
    found: dict[str, _File] = {}  # by real path: a file named twice must not be on both
    for given in paths:  # sides of the split
        path = os.path.expanduser(given)
        with _readable(path):
            os.stat(path)
        if os.path.isdir(path):
            files = _walk(path, allowed)
            if not files:
                raise DataError(
                    f"{path}: no {_either(allowed)} file in this folder; "
                    f"give a folder or file that has data"
                )
        else:
            files = [_File(path, os.fsencode(os.path.basename(path)), named=True)]
            if files[0].suffix not in allowed:
                raise DataError(
                    f"{path}: cannot read files named "
                    f"{files[0].suffix or 'without a suffix'}; convert it to "
                    f"{_either(allowed)}"
                )
        for file in files:
            found.setdefault(os.path.realpath(file.path), file)
    return list(found.values())


def _walk(
    root: str,
    suffixes: Sequence[str],
    *,
    skip: frozenset[str] = frozenset(),
    strict: bool = True,
) -> list[_File]:
    """The files below `root` with one of `suffixes`, sorted by relative path."""

    def fail(error: OSError) -> None:
        if strict:
            with _readable(error.filename):
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
            file = _File(path, os.fsencode(key), named=False)
            if file.suffix in suffixes:
                files.append(file)
    return sorted(files, key=lambda file: file.key)


def _is_text(files: Sequence[_File]) -> bool:
    texts = [file for file in files if file.suffix in TEXT_SUFFIXES]
    tokens = [file for file in files if file.suffix in TOKEN_SUFFIXES]
    if texts and tokens:
        raise DataError(
            f"{texts[0].path}: text cannot be mixed with token files "
            f"({tokens[0].path}); give one kind only"
        )
    return bool(texts)


def _read_text_files(files: Sequence[_File], name: str) -> tuple[int, list[_Source]]:
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    documents: list[tuple[_File, list[bytes]]] = []
    for file in files:
        with _readable(file.path):
            rows = [row for row in readers[file.suffix](file.path) if row]
        if rows:
            documents.append((file, rows))
        elif file.named:
            raise DataError(f"{file.path}: empty; give a file with text")
    if len(documents) == 1:
        sources = [_text_source(row, row) for row in documents[0][1]]
    else:
        sources = [
            _text_source(file.key, SEPARATOR.join(rows)) for file, rows in documents
        ]
    return len(documents), sources


def _text_source(key: bytes, content: bytes) -> _Source:
    return _Source(key, np.frombuffer(content, np.uint8))


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
            f"{path}: reading .parquet needs pyarrow; pip install 'jaxckpt[data]'"
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


def _token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u4" if vocab_size > 2**16 else "<u2")


def _read_token_file(file: _File, vocab_size: int) -> _Source:
    path = file.path
    with _readable(path):
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
    return _Source(file.key, tokens)


def _map_bin(path: str, vocab_size: int) -> np.ndarray:
    dtype, size = _token_dtype(vocab_size), os.stat(path).st_size
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


def _split(
    sources: Sequence[_Source],
    *,
    separator: np.ndarray,
    dtype: np.dtype,
    needed: int,
    name: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Train and validation tokens, at least `needed` of each."""
    if len(sources) == 1:
        tokens = sources[0].tokens
        tail = max(needed, len(tokens) // VALIDATION_SHARE)
        if len(tokens) - tail < needed:
            raise _too_short(name, len(tokens), needed, best=len(tokens) // 2)
        return tokens[:-tail], tokens[-tail:]

    # In the order of their hashes, the first sources are the validation part: those in
    # the lowest twentieth, and more only if these do not make one window.
    hashes = [_fraction(source.key) for source in sources]
    order = sorted(range(len(sources)), key=hashes.__getitem__)  # stable: ties by place
    least = sum(fraction < 1 / VALIDATION_SHARE for fraction in hashes)
    least = min(max(least, 1), len(sources) - 1)
    gap = len(separator)
    lengths = [len(sources[i].tokens) + gap for i in order]
    total, held_out, best = sum(lengths), sum(lengths[: least - 1]), 0
    for count in range(least, len(sources)):
        held_out += lengths[count - 1]
        shorter = min(held_out, total - held_out) - gap  # no separator after the last
        best = max(best, shorter)
        if shorter >= needed:
            validation, train = sorted(order[:count]), sorted(order[count:])
            return (
                _join([sources[i].tokens for i in train], separator, dtype),
                _join([sources[i].tokens for i in validation], separator, dtype),
            )
    raise _too_short(name, total - gap, needed, best=best)


def _join(
    parts: Sequence[np.ndarray], separator: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]  # no copy: still memory-mapped
    pieces = [piece for part in parts for piece in (part, separator)]
    return np.concatenate(pieces[:-1], dtype=dtype, casting="unsafe")


def _fraction(key: bytes) -> float:
    """A hash in [0, 1), the same on every machine."""
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _too_short(name: str, total: int, needed: int, *, best: int) -> DataError:
    shorter = f" or use --seq-len={best - 1} or less" if best > 1 else ""
    return DataError(
        f"{name}: {total} tokens cannot be split into {needed} to train on and "
        f"{needed} to validate on, as --seq-len={needed - 1} needs; add data{shorter}"
    )


def _check_text_vocabulary(name: str, vocab_size: int) -> None:
    if vocab_size < 256:
        raise DataError(
            f"{name}: text is read as bytes, which do not fit "
            f"--vocab-size={vocab_size}; use --vocab-size=256 or more"
        )


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
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


def _listing(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    return ", ".join(paths[:2]) + more


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"
