"""Experiments: each says what it asks and expects; their parts at reduced size."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import experiments
from experiments import all as every
from experiments import (
    budgets,
    claims,
    collectives,
    common,
    depth,
    korthikanti,
    peers,
    same_training,
    shares,
    thousand_gpus,
)
from jaxckpt import pictures
from jaxckpt.compiler.targets import TargetError
from jaxckpt.extras import install

FOLDER = Path(experiments.__path__[0])
NAMES = every.EXPERIMENTS


def docstring(name):
    return ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""


@pytest.mark.parametrize("name", [*NAMES, "all", "gpu_check"])
def test_an_experiment_says_what_it_asks_and_expects(name):
    text = docstring(name)
    assert text.partition("\n")[0], "no question"
    assert f"    python -m experiments.{name}" in text, "no command"
    assert "Takes " in text or name == "gpu_check", "no run time"
    assert "Expected" in text or name == "gpu_check", "no expected result"


def test_all_runs_all():
    found = {
        path.stem
        for path in FOLDER.glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
    }
    assert found >= {*NAMES, "all", "gpu_check"}


def test_results_are_small_and_say_what_made_them():
    pictures = list((FOLDER / "results").glob("*.png"))
    assert pictures
    for path in pictures:
        assert path.stat().st_size < 150_000, path.name
        name = path.name.removesuffix(".png").removesuffix("_timeline")
        source = path.with_name(f"{name.removesuffix('_kept')}.json")
        result = json.loads(source.read_text())
        assert "versions" in result or "jax" in result, path.name


def test_an_experiment_that_fails_is_told(monkeypatch, tmp_path, capsys):
    def fail(name, arguments):
        assert arguments == ["--out", str(tmp_path), "--fast"]
        return (
            (1.0, 1, "not as expected: too large") if name == "depth" else (2.0, 0, "")
        )

    monkeypatch.setattr(every, "run", fail)
    monkeypatch.setattr(sys, "argv", ["all", "--fast", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="not as expected: depth$"):
        every.main()
    assert "too large" in capsys.readouterr().out


def test_a_process_that_ends_badly_has_a_code_and_a_line(monkeypatch):
    done = subprocess.CompletedProcess([], 3, stdout="a\nb\n")
    monkeypatch.setattr(every.subprocess, "run", lambda *args, **more: done)
    assert every.run("depth", [])[1:] == (3, "b")


def test_small_results_do_not_replace_whole_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    parser = common.options_of("x")
    assert common.folder(parser.parse_args(["--fast"])) == tmp_path / "fast"
    assert common.folder(parser.parse_args([])) == tmp_path
    out = parser.parse_args(["--fast", "--out", str(tmp_path / "o")])
    assert common.folder(out) == tmp_path / "o"


def test_what_is_not_installed_is_said_at_the_start(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["experiments/depth.py", "--out", str(tmp_path)])
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(depth, "depths", lambda chosen: pytest.fail("it began"))
    with pytest.raises(SystemExit) as left:
        depth.main()
    assert left.value.code == 2
    said = f"experiments.depth: error: needs matplotlib: {install('plot')}\n"
    assert capsys.readouterr().err == said


def test_a_missing_compiler_is_one_line(monkeypatch, capsys):
    def missing(target):
        raise TargetError("compiling needs pip install x")

    monkeypatch.setattr(sys, "argv", ["experiments/claims.py"])
    monkeypatch.setattr(common, "check_installed", missing)
    with pytest.raises(SystemExit) as left:
        common.check_compiler("h100:8")
    assert left.value.code == 2
    said = "experiments.claims: error: compiling needs pip install x\n"
    assert capsys.readouterr().err == said


def test_a_result_says_what_made_it(tmp_path):
    common.write(tmp_path / "x.json", {"rows": [], "versions": {"other": "1.2"}})
    result = json.loads((tmp_path / "x.json").read_text())
    assert list(result) == ["versions", "rows"]
    assert {"python", "jax", "machine", "other"} <= set(result["versions"])
    assert result["versions"]["other"] == "1.2"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were written."""
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append(figure))
    return figures


def committed(name):
    return json.loads((FOLDER / "results" / f"{name}.json").read_text())


def in_legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


# depth


@pytest.fixture(scope="module")
def shallow():
    """What `depth` compiles, at two depths; the rest as it came out once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depth, "POLICIES", ("none", "full", "sqrt"))
        rows = depth.depths((4, 16))
    return {
        "depths": rows,
        "plans": [],
        "shrinking": [
            {"tokens": 16384, "weights_over_input": 0.01, "full": 100, "sqrt": 70},
            {"tokens": 16, "weights_over_input": 8, "full": 100, "sqrt": 300},
        ],
        "groups": [{"group": size, "inputs": 20 + abs(size - 8)} for size in (4, 8)],
    }


def test_memory_follows_the_formulas_at_any_depth(shallow, tmp_path):
    assert depth.findings(shallow) == []
    depth.draw(shallow, tmp_path / "depth.png")
    assert (tmp_path / "depth.png").stat().st_size > 10_000


def test_what_is_off_is_found(shallow):
    rows = [dict(row) for row in shallow["depths"]]
    for row in rows:
        row["inputs"] *= 1.3 if row["policy"] == "sqrt" else 1
    plan = {"layers": 16, "budget": 10, "planned_total": 11}
    plan |= {"recomputed_layers": 25, "sqrt_recomputed_layers": 24}
    groups = [{"group": 8, "inputs": 20}, {"group": 4, "inputs": 15}]
    shrinking = shallow["shrinking"][:1]
    wrong = {"depths": rows, "plans": [plan], "groups": groups, "shrinking": shrinking}
    found = depth.findings(wrong)
    assert found[0].startswith("sqrt at 16 layers takes ")
    assert found[1:] == [
        "the plan of 16 layers is over its budget",
        "the plan of 16 layers recomputes more than sqrt",
        "sqrt is not the best group size",
        "sqrt does not stop paying",
    ]


def test_the_formula_is_drawn_beside_what_was_compiled(shallow, drawn):
    depth.draw(shallow, None)
    lines = {line.get_linestyle() for line in drawn[0].axes[0].get_lines()}
    assert lines == {"--", "None"}
    assert depth.constants(shallow["depths"]).keys() == {"none", "full", "sqrt"}


# others


def test_every_named_policy_is_in_the_key_of_budgets(drawn):
    result = committed("budgets")
    budgets.draw(result, None)
    said = "\n".join(in_legend(drawn[0])).replace(",\n", ",")
    for row in result["named"]:
        assert row["policy"] in said
    assert "..." not in said


def test_ratios_to_the_paper_are_drawn_as_they_are(drawn):
    rows = [
        r for r in committed("korthikanti")["rows"] if r["configuration"] != "naive"
    ]
    korthikanti.draw({"rows": rows}, None)
    (axes,) = drawn[0].axes
    found = [y for line in axes.get_lines()[3:] for y in line.get_ydata()]
    assert found == [row["compiled"] / row["paper"] for row in rows]
    low, high = axes.get_ylim()
    assert low < min(found) and max(found) < high
    assert "equal to the paper's formula in 28 of 28" in axes.get_title()


def test_policies_of_one_curve_have_a_marker_each(drawn):
    same_training.draw(committed("same_training")["losses"], None)
    above, below = drawn[0].axes
    markers = [line.get_marker() for line in above.get_lines()[:-1]]
    assert len(set(markers)) == len(markers) == len(same_training.POLICIES)
    apart, equal = (line.get_xdata() for line in below.get_lines()[:2])
    assert sorted([*apart, *equal]) == list(range(1, 61))


def test_losses_that_differ_are_found(tmp_path):
    curve = [5.0 - 0.05 * step for step in range(40)]
    runs = {"none": curve, "full": [loss * (1 + 1e-7) for loss in curve]}
    assert same_training.findings(same_training.compare(runs), curve) == []
    same_training.draw(runs, tmp_path / "x.png")
    runs["sqrt"] = [*curve[:-1], curve[-1] * 1.001]
    rows = same_training.compare(runs)
    assert rows[-1]["at_step"] == 40
    assert same_training.findings(rows, curve) == ["sqrt differs by 1.0e-03"]
    assert same_training.findings([], [5.0, 4.9]) == ["nothing was learned"]


def test_a_peer_that_does_better_is_found():
    row = {"saved_bytes": 10, "ours_saved_bytes": 10, "theirs": 5, "ours": 5}
    assert peers.findings([row]) == []
    assert (
        len(peers.findings([{**row, "ours": 6}, {**row, "ours_saved_bytes": 11}])) == 2
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mlpwi_0", "MLP"),
        ("silu bfloat16[8,64,11008]", "MLP"),
        ("context", "attention"),
        ("exp float32[4,32,64,64]", "attention"),
        ("mul float32[8,64,4096]", "norms and residual stream"),
        ("convert_element_type bfloat16[4096,11008]", "cast weights"),
    ],
)
def test_what_a_kept_value_is_of(name, part):
    assert claims.part_of(name, claims.model_config("llama-7b")) == part


def test_plans_that_do_not_fit_are_found():
    plan = {
        "target": "h100:128x8", "device_total_bytes": 30 * 2**30, "seconds": 100,
        "largest_process_bytes": 2**30,
    }  # fmt: skip
    assert thousand_gpus.findings({"a": plan}) == []
    assert thousand_gpus.findings({"a": {**plan, "seconds": 1000}}) == [
        "a took 1000 seconds"
    ]
    assert thousand_gpus.findings({"a": {**plan, "device_total_bytes": 2**40}})


def test_a_collective_that_is_sent_again_is_noticed():
    result = json.loads((FOLDER / "results" / "collectives.json").read_text())
    for mesh in result["meshes"]:
        assert collectives.findings(mesh["mesh"], mesh["rows"]) == []
    rows = result["meshes"][0]["rows"]
    (kept,) = (row for row in rows if row["policy"] == "save:gathered_weights")
    kept["collective_bytes"]["recompute"]["all-gather"] = 1
    kept["spared_bytes"] = 0
    assert collectives.findings("fsdp:8", rows) == [
        "fsdp:8, save:gathered_weights: all-gather in recompute",
        "fsdp:8, save:gathered_weights spares nothing",
    ]


def test_shares_that_are_apart_are_noticed():
    row = {"policy": "full", "overhead_share_of_step": 0.1, "saving_share_of_step": 0.1}
    result = {"model": "tiny", "policies": [{**row, "profile_share_of_step": 0.15}]}
    assert shares.findings(result, points=6) == []
    assert shares.findings(result, points=3) == [
        "tiny, full: the profile is -5.0 points off"
    ]
