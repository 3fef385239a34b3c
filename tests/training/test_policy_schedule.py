"""Policy schedules: their text, their rules, and runs that switch."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxckpt.models.presets import ConfigError, model_config
from jaxckpt.policies import PolicyError
from jaxckpt.training import inspect, loop
from jaxckpt.training.canonical import to_canonical
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.metrics import MetricsLog
from jaxckpt.training.policy_schedule import (
    ByHeadroom,
    ByLoss,
    ByStep,
    Schedule,
    make_chooser,
    parse_schedule,
)
from jaxckpt.training.step import compile_layout_change, same_layout

pytestmark = pytest.mark.xdist_group("schedule")  # what is made once is shared

ROOT = Path(__file__).parents[2]

# Six switches: names with commas, a grouping, a layer plan, and two ways back.
POLICIES = [
    "save:context,out_proj",
    "nothing_saveable",
    "every:2",
    "1xnone+2xfull",
    "save:context,out_proj",
    "every:2",
    "none",
]
SIX = ",".join(f"{2 * n}:{policy}" for n, policy in enumerate(POLICIES))

# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    "text, starts, entries",
    [
        ("0:full", (0,), ("full",)),
        (
            "0:dots_saveable,1000:nothing_saveable",
            (0, 1000),
            ("dots_saveable", "nothing_saveable"),
        ),
        (
            "0:save:context,out_proj,100:full",
            (0, 100),
            ("save:context,out_proj", "full"),
        ),
        (
            " 0 : save:a/offload:b,c , 7 : 2xnone+2xfull ",
            (0, 7),
            ("save:a/offload:b,c", "2xnone+2xfull"),
        ),
        (
            "0:megatron:full:block:2,5:every:2/save:a,b,9:revolve:3",
            (0, 5, 9),
            ("megatron:full:block:2", "every:2/save:a,b", "revolve:3"),
        ),
        (SIX, tuple(range(0, 14, 2)), tuple(POLICIES)),
    ],
)
def test_steps_are_read(text, starts, entries):
    assert parse_schedule(text) == Schedule(entries, starts)


@pytest.mark.parametrize(
    "text, rule, entries",
    [
        ("auto:loss:full,none", "loss", ("full", "none")),
        (
            "auto:headroom:save:context,out_proj,dots_saveable,2xsave:a,b+2xfull",
            "headroom",
            ("save:context,out_proj", "dots_saveable", "2xsave:a,b+2xfull"),
        ),
        (
            "auto: loss: megatron:selective, maxtext:minimal",
            "loss",
            ("megatron:selective", "maxtext:minimal"),
        ),
        (
            "auto:length: 8 = none, 016=save:context,out_proj,32=none",
            "length",
            ("8=none", "16=save:context,out_proj", "32=none"),
        ),
    ],
)
def test_rules_are_read(text, rule, entries):
    assert parse_schedule(text) == Schedule(entries, (), rule)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("0:full,20:none,10:full", "steps are out of order, 10 comes after 20"),
        ("0:full,10:none,10:full", "steps are out of order, 10 comes after 10"),
        ("5:full", "starts at step 5; the first entry is of step 0"),
        ("full", "'full' is no STEP:POLICY"),
        ("0:full,none", "unknown policy 'full,none'"),
        ("0:none,abc:full", "'abc' is no step"),
        ("0:full,-3:none", "'-3:none' is no STEP:POLICY"),
        ("0:", "'0:' is no STEP:POLICY"),
        ("0:dots_savable,5:full", "Did you mean 'dots_saveable'?"),
        ("0:full,5:save:contxt", "Did you mean 'context'?"),
        ("0:full,5:9xfull", "plans 9 layers and the stack has 4"),
        ("0:full,5:auto", "unknown policy 'auto'"),
        ("auto:lss:full,none", "unknown rule 'lss'. Did you mean 'loss'? Known: loss"),
        ("auto:size:full,none", "unknown rule 'size'. Known: loss, headroom, length"),
        ("auto:length", "'' is no LENGTH=POLICY; as in auto:length:256=none,1024=full"),
        ("auto:length:full,none", "'full,none' is no LENGTH=POLICY"),
        ("auto:length:0=full", "'0=full' is no LENGTH=POLICY"),
        ("auto:length:-8=full,16=none", "'-8=full' is no LENGTH=POLICY"),
        ("auto:length:8=,16=none", "'8=' is no LENGTH=POLICY"),
        ("auto:length:16=full,8=none", "lengths are out of order, 8 comes after 16"),
        ("auto:length:8=full,8=none", "lengths are out of order, 8 comes after 8"),
        ("auto:length:8=ful,16=none", "Did you mean 'full'?"),
        ("auto:length:8=full,16=save:contxt", "Did you mean 'context'?"),
        ("auto", "unknown rule ''"),
        ("auto:loss", "needs two different policies"),
        ("auto:loss:full", "needs two different policies"),
        ("auto:loss:full,full", "needs two different policies"),
        ("auto:loss:full,nne", "unknown policy 'full,nne'"),
    ],
)
def test_bad_schedules_are_refused_in_one_line(text, problem):
    with pytest.raises((ConfigError, PolicyError)) as caught:
        TrainConfig(policy_schedule=text)
    (line,) = str(caught.value).splitlines()
    assert problem in line


@pytest.mark.parametrize(
    "other, name",
    [
        (dict(policy="full"), "--policy=full"),
        (dict(policy="auto"), "--policy=auto"),
        (dict(plan="plan.json"), "--plan"),
    ],
)
def test_a_schedule_is_in_place_of_a_policy(other, name):
    with pytest.raises(ConfigError, match=f"^--policy-schedule is in place of {name};"):
        TrainConfig(policy_schedule="0:full,5:none", **other)


def test_which_policies_a_part_of_a_run_needs():
    schedule = parse_schedule("0:full,10:none,20:full,30:sqrt")
    assert schedule.policies == ("full", "none", "sqrt")
    assert schedule.switches == (("full", "none"), ("none", "full"), ("full", "sqrt"))
    for span, wanted in {
        (0, 40): ("full", "none", "sqrt"),
        (0, 10): ("full",),
        (0, 11): ("full", "none"),
        (10, 20): ("none",),
        (9, 11): ("full", "none"),
        (35, 99): ("sqrt",),
    }.items():
        assert schedule.between(*span) == wanted
        first, last = span
        run_under = {ByStep(schedule).policy(step) for step in range(first, last)}
        assert set(wanted) == run_under
    rule = parse_schedule("auto:loss:full,none")
    assert rule.between(5, 6) == ("full", "none")
    assert set(rule.switches) == {("full", "none"), ("none", "full")}


# ---------------------------------------------------------------- rules


def under_loss(losses, window=2):
    """The policy after each step."""
    rule = ByLoss(Schedule(("few", "some", "all"), (), "loss"), window)
    found = []
    for step, loss in enumerate(losses, start=1):
        rule.observe(step, loss)
        found.append(rule.policy(step))
    return found


def test_the_loss_rule_saves_more_as_the_loss_converges():
    falling = [4.0, 4.0, 3.0, 3.0, 2.0, 2.0]
    assert under_loss(falling) == 6 * ["few"]
    flat = [2.0] * 8
    assert under_loss(flat) == ["few"] * 3 + ["some"] * 2 + ["all"] * 3
    again = [2.0] * 6 + [1.5] * 2
    assert under_loss(again)[5:] == ["all", "all", "some"]
    between = [2.0] * 4 + [1.94] * 2 + [1.88] * 2  # 3 % each: neither
    assert under_loss(between)[3:] == ["some"] * 5


def test_the_loss_rule_goes_by_means_of_windows():
    noisy = [2.1, 1.9] * 4
    assert under_loss(noisy, window=2) == under_loss([2.0] * 8, window=2)
    assert under_loss(noisy, window=100) == ["few"] * 8


def test_the_loss_rule_replays_what_a_resumed_run_did():
    losses = list(enumerate([3, 2.9, 2.9, 2.9, 2.5, 2.2, 2.2, 2.2] * 60, start=1))
    schedule = parse_schedule("auto:loss:full,dots_saveable,none")
    options = dict(needs=[], room=lambda: None)
    straight = make_chooser(schedule, losses=losses, **options)
    resumed = make_chooser(schedule, losses=losses[:250], **options)
    for step, loss in losses[250:]:
        resumed.observe(step, loss)
    assert vars(straight) == vars(resumed)


def test_the_headroom_rule_has_hysteresis():
    schedule = Schedule(("few", "some", "all"), (), "headroom")
    rooms = iter([100, 100, 95, 88, 99, 101, 10, 1000, 1000])
    rule = ByHeadroom(schedule, [20, 40, 80], lambda: next(rooms), window=1)
    found = [rule.policy(0)]
    for step in range(1, 9):
        rule.observe(step, 0.0)
        found.append(rule.policy(step))
    # 80 fits into 0.8 x 100; it stays at 95 and 0.9 x 95 = 85.5, goes at 88; and
    # comes back at 101, not at 99; at 10 nothing fits and the first is left.
    assert found == ["all"] * 3 + ["some"] * 2 + ["all", "few", "some", "all"]


# ---------------------------------------------------------------- layouts


@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize("mesh", ["data:1", "fsdp:2,tensor:2"])
def test_a_switch_moves_every_number_and_keeps_no_second_copy(
    make_config, programs, mesh
):
    old = programs(make_config("every:2"), mesh)
    new = programs(make_config("1xnone+2xfull"), mesh)
    change = compile_layout_change(old, new)
    state = old.init()
    noise = np.random.default_rng(0)
    state["opt_state"] = jax.tree.map(  # else the moments are all zero
        lambda leaf: jax.device_put(
            noise.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding
        ),
        state["opt_state"],
    )
    before = to_canonical(old, state)
    moved = change(state)
    after = to_canonical(new, moved)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    shape = jax.tree.map(lambda leaf: (leaf.shape, leaf.sharding), new.state)
    assert shape == jax.tree.map(lambda leaf: (leaf.shape, leaf.sharding), moved)
    olds = jax.tree.leaves(state["params"]["layers"])
    assert olds and all(leaf.is_deleted() for leaf in olds)
    # What is no layer is not touched.
    assert moved["params"]["embedding"] is state["params"]["embedding"]


def test_the_same_layout_moves_nothing(make_config, programs):
    one, two, other = (
        programs(make_config(policy))
        for policy in ("dots_saveable", "save:context", "every:2")
    )
    assert same_layout(one, two) and not same_layout(one, other)
    state = one.state
    assert compile_layout_change(one, two)(state) is state
    unrolled = [
        programs(make_config(policy, architecture=dict(scan_layers=False)))
        for policy in ("none", "every:2")
    ]
    assert same_layout(*unrolled)


# ---------------------------------------------------------------- runs


def scheduled(make_config, text=SIX, **fields):
    options = dict(steps=14, snapshot_every=0, **fields)
    return dataclasses.replace(make_config(**options), policy_schedule=text)


def records(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def unswitched(compile_fast, make_config, run_training, tmp_path_factory):
    config = make_config(steps=14, snapshot_every=0)
    return run_training(config, tmp_path_factory.mktemp("unswitched"))


@pytest.mark.slow
@pytest.mark.usefixtures("compile_fast")
def test_six_switches_train_as_none_and_recompile_nothing(
    make_config, run_training, unswitched, compilations, tmp_path
):
    config = scheduled(make_config, eval_every=3, eval_batches=1)
    losses = run_training(config, tmp_path)
    np.testing.assert_allclose(losses, unswitched, rtol=1e-6, atol=0)
    found = records(tmp_path)
    assert [record["policy"] for record in found] == [p for p in POLICIES for _ in "12"]
    assert len(compilations) == 14 and compilations[0] >= len(set(POLICIES))
    assert set(compilations[1:]) == {compilations[0]}
    receipts = {path.name for path in tmp_path.glob("receipt*.json")}
    assert receipts == {"receipt.json", *(f"receipt-{n}.json" for n in range(0, 14, 2))}
    for step, policy in zip(range(0, 14, 2), POLICIES, strict=True):
        receipt = json.loads((tmp_path / f"receipt-{step}.json").read_text())
        assert receipt["requested"] == policy
    assert json.loads((tmp_path / "receipt.json").read_text()) == receipt


@pytest.mark.usefixtures("compile_fast")
def test_compilations_are_counted(make_config, run_training, compilations, tmp_path):
    """The count above can fail: validation is compiled when a plain run needs it."""
    config = make_config(steps=3, snapshot_every=0, eval_every=2, eval_batches=1)
    run_training(config, tmp_path)
    assert compilations[1] > compilations[0]


def resumed(config, workdir):
    return dataclasses.replace(config, resume=True, workdir=str(workdir))


@pytest.mark.slow
@pytest.mark.usefixtures("compile_fast")
def test_a_run_killed_between_switches_goes_on_as_it_would_have(
    make_config, run_training, unswitched, killed_at, tmp_path
):
    text = "0:none,3:every:2,9:none"
    config = dataclasses.replace(scheduled(make_config, text), snapshot_every=3)
    with killed_at(8):
        run_training(config, tmp_path)
    assert len(records(tmp_path)) == 7
    losses = run_training(resumed(config, tmp_path), tmp_path)
    np.testing.assert_allclose(losses, unswitched, rtol=1e-6, atol=0)
    assert [record["policy"] for record in records(tmp_path)] == (
        3 * ["none"] + 6 * ["every:2"] + 5 * ["none"]
    )
    receipt = json.loads((tmp_path / "receipt-6.json").read_text())
    assert receipt["requested"] == "every:2"


@pytest.mark.slow
@pytest.mark.usefixtures("compile_fast")
def test_the_loss_rule_in_a_run_that_is_resumed(
    make_config, run_training, unswitched, killed_at, tmp_path, monkeypatch
):
    monkeypatch.setattr(ByLoss.__init__, "__defaults__", (2,))
    monkeypatch.setattr(ByLoss, "SLOW", 0.5)
    monkeypatch.setattr(ByLoss, "FAST", 0.9)
    text = "auto:loss:every:2,none"
    config = dataclasses.replace(scheduled(make_config, text), snapshot_every=3)
    with killed_at(11):
        run_training(config, tmp_path)
    losses = run_training(resumed(config, tmp_path), tmp_path)
    np.testing.assert_allclose(losses, unswitched, rtol=1e-6, atol=0)
    rule, wanted = ByLoss(config.schedule, 2), []
    for step, loss in enumerate(losses, start=1):
        wanted.append(rule.policy(step))
        rule.observe(step, loss)
    assert [record["policy"] for record in records(tmp_path)] == wanted
    assert len(set(wanted[:9])) == 2  # it had switched before the snapshot


@pytest.mark.usefixtures("compile_fast")
def test_the_headroom_rule_in_a_run(make_config, run_training, tmp_path, monkeypatch):
    text = "auto:headroom:full,none"
    with pytest.raises(ConfigError, match="auto:headroom is not possible here: cpu"):
        run_training(scheduled(make_config, text), tmp_path / "refused")
    room = {"bytes": 1 << 40}
    monkeypatch.setattr(loop, "device_room", lambda *args: room["bytes"])
    monkeypatch.setattr(ByHeadroom.__init__, "__defaults__", (4,))
    original = MetricsLog.write

    def write(log, record):
        room["bytes"] = 1 << 40 if record["step"] < 6 else 1
        original(log, record)

    monkeypatch.setattr(MetricsLog, "write", write)
    run_training(scheduled(make_config, text), tmp_path / "run")
    policies = [record["policy"] for record in records(tmp_path / "run")]
    assert policies == 8 * ["none"] + 6 * ["full"]


# ---------------------------------------------------------------- refused before step 0


@pytest.mark.usefixtures("compile_fast")
def test_a_policy_that_does_not_fit_is_refused_before_the_first_step(
    make_config, run_training, tmp_path, monkeypatch
):
    limit = 3_300_000
    monkeypatch.setattr(inspect, "_device_limit", lambda placement: limit)
    config = scheduled(make_config, "0:full,5:none", batch_size=32)
    with pytest.raises(ConfigError) as caught:
        run_training(config, tmp_path)
    (line,) = str(caught.value).splitlines()
    told = r"--policy-schedule: none does not fit: it needs [\d.]+ MiB and the device"
    assert re.match(told, line)
    assert not (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.usefixtures("compile_fast")
def test_a_policy_that_does_not_compile_is_refused_before_the_first_step(
    make_config, run_training, tmp_path, monkeypatch
):
    original = inspect.compile_step
    calls = []

    def compile_step(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise jax.errors.JaxRuntimeError("INTERNAL: no such kernel\nmore")
        return original(*args, **options)

    monkeypatch.setattr(inspect, "compile_step", compile_step)
    with pytest.raises(ConfigError) as caught:
        run_training(scheduled(make_config, "0:none,5:every:2"), tmp_path)
    assert str(caught.value) == (
        "--policy-schedule: every:2 does not compile: INTERNAL: no such kernel"
    )
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_refused_by_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxckpt.train", "--policy-schedule=0:full,9:nne"],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "unknown policy 'nne'" in line
    assert not list(tmp_path.iterdir())


def test_the_text_needs_no_jax():
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import jaxckpt.training.policy_schedule\n"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT)], capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


# ---------------------------------------------------------------- long runs

# The layer plan is one as a planner writes it, with automatic names.
PLANNED = "1xsave:add.0,dot_general.0,context+3xfull"
SIX_OF_TINY = SIX.replace("1xnone+2xfull", PLANNED)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:2,fsdp:2"])
def test_tiny_with_six_switches_trains_as_without(
    make_config, run_training, compilations, tmp_path, mesh
):
    fields = dict(steps=14, snapshot_every=0, eval_every=0, batch_size=8)
    config = TrainConfig(architecture=model_config("tiny", attention="xla"), **fields)
    plain = run_training(config, tmp_path / "plain", mesh)
    compilations.clear()
    config = dataclasses.replace(config, policy_schedule=SIX_OF_TINY)
    losses = run_training(config, tmp_path / "switched", mesh)
    np.testing.assert_allclose(losses, plain, rtol=1e-6, atol=0)
    assert set(compilations[1:]) == {compilations[0]}
