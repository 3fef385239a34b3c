"""From files to tokens: read text or token files and split off a validation part.

Text is read as UTF-8 bytes, one token per byte, with a 0 byte between documents; token
files are mapped, not read (`jaxckpt.training.readers`). Without any path the corpus is
the text of the Python standard library, which is on every machine.

The split depends on names and contents only, never on the machine. Files named val,
valid, validation, test or dev, alone or before one of ``-_.`` and more, are the
validation part, and all others are trained on. Where no name says so, a file goes to
validation when the hash of its path, relative to the folder it was found in, falls in
the lowest twentieth. A single .jsonl or .parquet file is split by the hash of each row;
one single document, or one token file, gives its last twentieth.
"""

import contextlib
import hashlib
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxckpt.training.readers import (
    SEPARATOR,
    TEXT_SUFFIXES,
    TOKEN_SUFFIXES,
    DataError,
    File,
    Source,
    find_files,
    read_text_files,
    read_token_file,
    text_source,
    token_dtype,
    walk,
)

VALIDATION_SHARE = 20  # one file, row or token in so many
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "__pycache__")
)


_IDENTIFYING = 1 << 20  # tokens


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

    def identity(self) -> str:
        """The same for the same training tokens: of their number and both ends."""
        content = hashlib.blake2b(str(self.train.size).encode(), digest_size=8)
        for end in (self.train[:_IDENTIFYING], self.train[-_IDENTIFYING:]):
            content.update(np.ascontiguousarray(end).tobytes())
        return content.hexdigest()


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
        files = find_files(paths)
        text = _is_text(files)
        if text:
            _check_text_vocabulary(files[0].path, vocab_size)
            num_files, sources = read_text_files(files)
        else:
            sources = [read_token_file(file, vocab_size) for file in files]
            sources = [source for source in sources if len(source.tokens)]
            num_files = len(sources)
    if not sources:
        raise DataError(f"{name}: only empty files; give files with data")
    train, validation = _split(
        sources,
        separator=np.frombuffer(SEPARATOR if text else b"", np.uint8),
        dtype=np.dtype(np.uint8) if text else token_dtype(vocab_size),
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


def _standard_library() -> list[Source]:
    root = sysconfig.get_path("stdlib")
    sources = []
    for file in walk(root, (".py",), skip=_NOT_STDLIB, strict=False):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            with open(file.path, "rb") as stream:
                content = stream.read()
            content.decode()
            if content and SEPARATOR not in content:
                sources.append(text_source(file.key, content))
    if not sources:
        raise DataError(f"{root}: no Python sources here; name your own text files")
    return sources


def _is_text(files: Sequence[File]) -> bool:
    texts = [file for file in files if file.suffix in TEXT_SUFFIXES]
    tokens = [file for file in files if file.suffix in TOKEN_SUFFIXES]
    if texts and tokens:
        raise DataError(
            f"{texts[0].path}: text cannot be mixed with token files "
            f"({tokens[0].path}); give one kind only"
        )
    return bool(texts)


def _split(
    sources: Sequence[Source],
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

    held_out = {i for i, source in enumerate(sources) if source.for_validation}
    if not 0 < len(held_out) < len(sources):
        held_out = _hashed_lowest(sources, len(separator), needed, name)
    parts = []
    for of_validation in False, True:
        chosen = [i for i in range(len(sources)) if (i in held_out) == of_validation]
        parts.append(_join([sources[i].tokens for i in chosen], separator, dtype))
    train, validation = parts
    if min(len(train), len(validation)) < needed:
        raise DataError(
            f"{name}: {len(validation)} tokens in files named for validation and "
            f"{len(train)} in the others; --seq-len={needed - 1} needs {needed} in each"
        )
    return train, validation


def _hashed_lowest(
    sources: Sequence[Source], gap: int, needed: int, name: str
) -> set[int]:
    """The first sources in the order of their hashes: those in the lowest twentieth,
    and more only if these do not make one window."""
    hashes = [_fraction(source.key) for source in sources]
    order = sorted(range(len(sources)), key=hashes.__getitem__)  # stable: ties by place
    least = sum(fraction < 1 / VALIDATION_SHARE for fraction in hashes)
    least = min(max(least, 1), len(sources) - 1)
    lengths = [len(sources[i].tokens) + gap for i in order]
    total, held_out, best = sum(lengths), sum(lengths[: least - 1]), 0
    for count in range(least, len(sources)):
        held_out += lengths[count - 1]
        shorter = min(held_out, total - held_out) - gap  # no separator after the last
        best = max(best, shorter)
        if shorter >= needed:
            return set(order[:count])
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


def _listing(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    return ", ".join(paths[:2]) + more


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"
