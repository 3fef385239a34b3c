"""Bytes, FLOPs and seconds as people write them."""

import pytest

from jaxckpt.units import (
    UnitError,
    format_bytes,
    format_flops,
    format_milliseconds,
    parse_bytes,
)


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("0", 0),
        (1234, 1234),
        ("1000", 1000),
        ("7B", 7),
        ("14GiB", 14 * 2**30),
        ("1.5 kib", 1536),
        ("60GB", 60 * 10**9),
        (" 2TiB ", 2 * 2**40),
        ("80%", 800),
        ("12.5%", 125),
    ],
)
def test_parse_bytes(text, nbytes):
    assert parse_bytes(text, whole=1000) == nbytes


@pytest.mark.parametrize(
    "text, part",
    [
        ("", "''"),
        ("lots", "'lots' is no number of bytes, such as 14GiB or 80%"),
        ("-1GiB", "'-1GiB'"),
        ("1.2.3GB", "'1.2.3GB'"),
        ("5 GiBs", "unknown unit 'GiBs' in '5 GiBs'"),
    ],
)
def test_what_is_no_number_of_bytes(text, part):
    with pytest.raises(UnitError) as error:
        parse_bytes(text)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_a_percentage_of_nothing_known():
    with pytest.raises(UnitError, match="memory is not known"):
        parse_bytes("80%")


def test_format_bytes():
    values = [None, 0, 1023, 1024, 1536, 2**20 - 1, 2**30, 3 * 2**40, 2**51]
    assert [format_bytes(value) for value in values] == [
        "unknown", "0 B", "1023 B", "1.00 KiB", "1.50 KiB", "1024.00 KiB", "1.00 GiB",
        "3.00 TiB", "2048.00 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize("nbytes", [1, 1024, 5 * 2**20, 14 * 2**30])
def test_what_is_written_is_read_back(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == nbytes


def test_format_flops():
    shown = [format_flops(value) for value in (0, 999, 2.5e9, 1.78e14, 3e21)]
    assert shown == [
        "0.00 FLOP", "999.00 FLOP", "2.50 GFLOP", "178.00 TFLOP", "3000.00 EFLOP",
    ]  # fmt: skip


def test_format_milliseconds():
    shown = [format_milliseconds(value) for value in (1.2345, 0.31, 0.01234, 2e-5)]
    assert shown == ["1234 ms", "310 ms", "12.3 ms", "0.02 ms"]
