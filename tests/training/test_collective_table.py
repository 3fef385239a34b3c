"""The table of collectives: kinds by phase, sums, and what a policy spares."""

import io

from rich.console import Console

from jaxckpt.training.collective_table import collective_table, total_sent

MIB = 2**20
NOTHING = {"forward": {}, "recompute": {}, "backward": {}, "other": {}}


def row(policy, **kinds):
    applied = "2xnothing_saveable" if policy == "full" else f"2x{policy}"
    sent = {**NOTHING, **kinds}
    return {"policy": policy, "applied": applied, "collective_kinds": sent}


FULL = row(
    "full",
    forward={"all-reduce": 4 * MIB},
    recompute={"all-reduce": 2 * MIB},
    backward={"all-reduce": 4 * MIB, "all-gather": MIB},
)
KEPT = row(
    "save:out_proj",
    forward={"all-reduce": 4 * MIB},
    backward={"all-reduce": 4 * MIB, "all-gather": MIB},
)
MORE = row("none", forward={"all-reduce": 16 * MIB})


def printed(rows):
    console = Console(file=io.StringIO(), width=100)
    console.print(collective_table(rows))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def test_every_kind_has_a_line_and_every_policy_its_sum():
    lines = printed([FULL, KEPT])
    assert "policy kind forward recompute backward other spared" in lines
    assert "full all-gather 1.00 MiB" in lines
    assert "all-reduce 4.00 MiB 2.00 MiB 4.00 MiB" in lines
    assert "all 4.00 MiB 2.00 MiB 5.00 MiB" in lines


def test_what_is_spared_is_against_full_remat():
    assert total_sent(FULL) == 11 * MIB
    lines = printed([KEPT, FULL, MORE])
    assert "all 4.00 MiB 5.00 MiB 2.00 MiB" in lines  # of save:out_proj
    assert "all 16.00 MiB -5.00 MiB" in lines


def test_without_full_remat_nothing_is_said_to_be_spared():
    assert "all 4.00 MiB 5.00 MiB" in printed([KEPT])


def test_one_device_and_a_tpu_have_no_table():
    unknown = {"policy": "full", "applied": "2xfull", "collective_kinds": None}
    assert collective_table([unknown]) is None
    assert collective_table([row("none")]) is None
