"""What a stranger types by mistake: one line that says what to do, exit code 2.

Commands run in this process, up to where they would compile; a few run as processes in
the test of each command. The tables below hold what those tests do not.
"""

import functools
import importlib
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import command_line, testing
from jaxckpt.training import benchmark, loop, planning, reporting
from jaxckpt.training import sensitivity as measuring

for _name in ("train", "report", "plan", "bench", "sensitivity"):
    importlib.import_module(f"jaxckpt.{_name}")
COMMANDS = {
    "train": (sys.modules["jaxckpt.train"], loop, "inspect_schedule"),
    "report": (sys.modules["jaxckpt.report"], reporting, "compile_rows"),
    "plan": (sys.modules["jaxckpt.plan"], planning, "plan_run"),
    "bench": (sys.modules["jaxckpt.bench"], benchmark, "measure"),
    "sensitivity": (sys.modules["jaxckpt.sensitivity"], measuring, "measure"),
}

# command line, and words of the line that it ends with
COMMAND_LINES = [
    # --- all commands: flags, models, sizes
    ("train --model", "--model"),
    ("train --model=", "unknown model ''"),
    ("train --policy=", "an empty policy"),
    ("train --polciy full", "--polciy", "Did you mean '--policy'?"),
    ("train --no-such-flag", "--no-such-flag"),
    ("train --dropout=1", "dropout is 1.0"),
    ("train --dropout=-0.1", "dropout is -0.1"),
    ("train --dropout=x", "--dropout: 'x' is no number"),
    ("train --num-heads=0", "num_heads is 0"),
    ("train --num-kv-heads=3", "num_kv_heads 3"),
    ("train --mlp-dim=-1", "mlp_dim is -1"),
    ("train --max-seq-len=0", "max_seq_len is 0"),
    ("train --vocab-size=0", "vocab_size is 0"),
    ("train --positions=rope", "--positions", "'rotary'"),
    ("train --compute-dtype=fp16", "--compute-dtype", "'float16'"),
    ("train --learning-rate=-1", "--learning-rate=-1"),
    ("train --learning-rate=inf", "--learning-rate=inf"),
    ("train --warmup-steps=-1", "--warmup-steps=-1"),
    ("train --keep-snapshots=0", "--keep-snapshots=0"),
    ("train --accumulate=3", "--accumulate=3", "--batch-size=18"),
    ("train --steps=1e3", "--steps: '1e3' is no whole number"),
    ("train --learning-rate=fast", "--learning-rate: 'fast' is no number"),
    ("train --batch-size=99999999999999999999", "--batch-size"),
    ("train --virtual-devices=-1", "--virtual-devices=-1"),
    ("train --virtual-devices=100000", "--virtual-devices=100000"),
    ("train --mesh=data:0", "data needs a number of devices"),
    ("train --mesh=pipe:3", "pipe"),
    ("train --no-scan-layers --mesh=pipe:2", "--no-scan-layers"),
    ("train --pipeline-repeats=2", "--pipeline-repeats"),
    ("train --pipeline-schedule=1f1b", "--pipeline-schedule", "'circular'"),
    ("train --offload-optimizer=yes", "--offload-optimizer", "'state'"),
    # --- policies, schedules, budgets
    ("train --policy=auto --memory-budget=-1GiB", "-1GiB"),
    ("train --policy=auto --memory-budget=0", "--memory-budget"),
    ("train --policy=auto --memory-budget=30", "did you mean 30GiB?"),
    ("train --policy=auto --memory-budget=40Gb/s", "40Gb/s"),
    ("train --policy=auto --memory-budget=nan", "nan"),
    ("train --policy=auto --memory-budget=0%", "--memory-budget"),
    ("train --policy=auto --memory-budget=150%", "150%"),
    ("train --memory-budget=1GiB", "--memory-budget needs --policy=auto"),
    ("train --policy=selective:", "''"),
    ("train --policy=selective:140%", "140%"),
    ("train --policy=maxtext:", "maxtext:"),
    ("train --policy=megatron:full:uniform:0", "megatron:full:uniform"),
    ("train --policy=megatron:full:block:x", "megatron:full:block"),
    ("train --policy=every:-1", "every:K"),
    ("train --policy=revolve:0", "revolve:S"),
    ("train --policy=2xfull,2xnone", "'full,2xnone'"),
    ("train --policy=offload:", "an empty name"),
    ("train --policy=none/save:context", "none"),
    ("train --policy-schedule=full", "--policy-schedule"),
    ("train --policy-schedule=0:full,0:none", "--policy-schedule"),
    ("train --policy-schedule=5:full", "--policy-schedule"),
    ("train --policy-schedule=auto:los:full,none", "--policy-schedule"),
    ("train --policy-schedule=0:full --policy=none,full", "--policy"),
    # --- files and folders
    ("train --data=nothing", "nothing: does not exist"),
    ("train --data=folder", "folder"),
    ("train --data=", ": "),
    ("train --plan=folder", "folder"),
    ("train --plan=list.json", "list.json"),
    ("train --plan=binary.json", "binary.json"),
    ("train --plan=strange.json", "strange.json"),
    ("train --workdir=text.json", "text.json"),
    ("train --workdir=text.json/run", "text.json"),
    ("train --workdir=folder --resume", "no complete snapshot in folder/snapshots"),
    # --- several processes
    ("train --num-processes=2", "--coordinator-address"),
    ("train --num-processes=2 --process-id=2 --coordinator-address=a:1", "process-id"),
    ("train --num-processes=2 --process-id=0 --coordinator-address=a", "HOST:PORT"),
    # --- report
    ("report --target=", "''"),
    ("report --target=h100:0", "h100:0"),
    ("report --target=h100:-1", "h100:-1"),
    ("report --target=h100:8x", "h100:8x"),
    ("report --target=folder:8", "folder"),
    ("report --target=text.textproto:8", "text.textproto"),
    ("report --target=binary.textproto:8", "binary.textproto"),
    ("report --policies auto", "auto"),
    ("report --policies none list.json", "list.json"),
    ("report --policies none missing.json", "missing.json"),
    ("report --function=module", "module"),
    ("report --function=:f", "--function"),
    ("report --tolerance=-1%", "--tolerance=-1%"),
    ("report --tolerance=x", "--tolerance=x"),
    ("report --compare=folder", "folder"),
    ("report --compare=binary.json", "binary.json"),
    ("report --json=folder", "--json=folder"),
    ("report --plot=x", "--plot=x"),
    ("report --cache=text.json", "text.json"),
    # --- plan
    ("plan --memory-budget=1GB --target=nowhere:8", "nowhere"),
    ("plan --memory-budget=0", "--memory-budget"),
    ("plan --memory-budget=-5GiB", "-5GiB"),
    ("plan --memory-budget=5GX", "unknown unit"),
    ("plan --memory-budget=.", "'.'"),
    ("plan --memory-budget=101% --target=h100:8", "101%"),
    ("plan --offload=always", "--offload", "'prefer'"),
    ("plan --offload=auto --host-budget=x", "'x'"),
    ("plan --mesh=auto", "--mesh=auto needs"),
    ("plan --mesh=fsdp:3 --target=h100:2", "fsdp:3"),
    ("plan --out=folder", "--out=folder"),
    ("plan --cache=text.json", "text.json"),
    # --- bench, sensitivity
    ("bench --steps=0", "--steps=0"),
    ("bench --policies list.json", "list.json"),
    ("bench --virtual-devices=3", "--batch-size=16"),
    ("sensitivity --threshold=2", "'2'"),
    ("sensitivity --threshold=x%", "'x%'"),
    ("sensitivity --threshold=nan", "'nan'"),
    ("sensitivity --rounds=0", "--rounds=0"),
    ("sensitivity --rounds=-3", "--rounds=-3"),
    ("sensitivity --json=folder", "--json=folder"),
    ("sensitivity --json=no/such.json", "--json=no/such.json"),
    ("sensitivity --mesh=fsdp:3 --virtual-devices=2", "fsdp:3"),
    ("sensitivity --batch-size=0", "--batch-size=0"),
]  # fmt: skip


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files that are not what a command asks for, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "strange.json").write_text('{"layer_plan": 3, "num_layers": "x"}')
    for name in ("text.json", "text.textproto"):
        (tmp_path / name).write_text("not what it seems")
    for name in ("binary.json", "binary.textproto"):
        (tmp_path / name).write_bytes(b"\xff\xfe\0")
    return tmp_path


@pytest.mark.parametrize(
    "line, words", [(line, words) for line, *words in COMMAND_LINES]
)
def test_a_bad_command_line_is_one_line(line, words, files, monkeypatch, capsys):
    name, *args = line.split(" ")
    module, room, heavy = COMMANDS[name]

    def reached(*args, **options):
        pytest.fail("got as far as compiling")

    monkeypatch.setattr(room, heavy, reached)
    monkeypatch.setattr(sys, "argv", [name, *args])
    before = sorted(files.rglob("*"))
    with pytest.raises(SystemExit) as exit:
        command_line.run(module.main, prog=module.PROG)
    output, errors = capsys.readouterr()
    assert exit.value.code == 2, errors
    (told,) = errors.splitlines()
    assert told.startswith(f"{module.PROG}: error: ") and "Traceback" not in output
    assert [word for word in words if word not in told] == []
    assert sorted(files.rglob("*")) == before


# ---------------------------------------------------------------- the library


def layer(x, w):
    return jnp.tanh(x @ w), None


def block(x, w):
    return jnp.tanh(x @ w)


X, W, WS = jnp.ones((2, 4)), jnp.ones((4, 4)), np.ones((3, 4, 4), np.float32)
split = jaxckpt.split_layers
CALLS = {
    "remat of a number": (lambda: jaxckpt.remat(3), "3"),
    "remat of text": (lambda: jaxckpt.remat("full"), "'full'"),
    "remat under None": (lambda: jaxckpt.remat(block, None), "None"),
    "remat under bytes": (lambda: jaxckpt.remat(block, b"full"), "b'full'"),
    "remat under a number": (lambda: jaxckpt.remat(block, 1), "1"),
    "remat under a list": (lambda: jaxckpt.remat(block, ["full"]), "['full']"),
    "remat under a layer plan": (lambda: jaxckpt.remat(block, "2xfull"), "stack"),
    "remat under a grouping": (lambda: jaxckpt.remat(block, "sqrt"), "stack"),
    "remat with an unknown name": (
        lambda: jaxckpt.remat(block, "save:hidden")(X, W),
        "no value is named 'hidden'",
    ),
    "remat with an automatic name of another block": (
        lambda: jaxckpt.remat(block, "save:tanh.7")(X, W),
        "tanh.7",
    ),
    "parse_policy of nothing": (lambda: jaxckpt.parse_policy(""), "''"),
    "parse_policy of None": (lambda: jaxckpt.parse_policy(None), "None"),
    "parse_policy of a depth": (lambda: jaxckpt.parse_policy("12xfull"), "stack"),
    "parse_layers of nothing": (lambda: jaxckpt.parse_layers(" "), "an empty policy"),
    "parse_layers of a float": (lambda: jaxckpt.parse_layers(0.5), "0.5"),
    "a policy of a name that is a number": (lambda: jaxckpt.Policy(save=(3,)), "3"),
    "a policy of names in one text": (lambda: jaxckpt.Policy(save="ab"), "'ab'"),
    "a plan for no layers": (lambda: jaxckpt.layer_plan("full", 0), "not 0"),
    "a plan for half a layer": (lambda: jaxckpt.layer_plan("full", 2.5), "2.5"),
    "a plan for layers in text": (lambda: jaxckpt.layer_plan("full", "12"), "'12'"),
    "a plan for no number": (lambda: jaxckpt.layer_plan("full", None), "None"),
    "a plan of another depth": (lambda: jaxckpt.layer_plan("2xfull", 3), "2 layers"),
    "groups larger than the stack": (
        lambda: jaxckpt.layer_plan("every:9", 3),
        "every:9",
    ),
    "stack of None": (lambda: jaxckpt.stack(None, "full", 3), "None"),
    "stack under None": (lambda: jaxckpt.stack(layer, None, 3), "None"),
    "stack of no layers": (lambda: jaxckpt.stack(layer, "full", 0), "not 0"),
    "stack of stacked weights": (
        lambda: jaxckpt.stack(layer, "full", 3)(X, WS),
        "use split_layers",
    ),
    "stack of weights of another plan": (
        lambda: jaxckpt.stack(layer, "1xfull+2xnone", 3)(X, split(WS, "full", 3)),
        "use split_layers",
    ),
    "stack of unrolled weights": (
        lambda: jaxckpt.stack(layer, "full", 3)(X, split(WS, "full", 3, scan=False)),
        "use split_layers",
    ),
    "stack of weights of another depth": (
        lambda: jaxckpt.stack(layer, "full", 2)(X, split(WS, "full", 3)),
        "2",
    ),
    "stack of groups of other sizes": (
        lambda: jaxckpt.stack(layer, "every:2", 4)(
            X, split(np.ones((6, 4, 4), np.float32), "every:3", 6)
        ),
        "use split_layers",
    ),
    "stack with an unknown name": (
        lambda: jaxckpt.stack(layer, "save:hid", 3)(X, split(WS, "save:hid", 3)),
        "'hid'",
    ),
    "stack of a layer without an output": (
        lambda: jaxckpt.stack(block, "full", 3)(X, split(WS, "full", 3)),
        "returns (carry, output), not an array float32[2,4]",
    ),
    "unrolled stack of a layer without an output": (  # its two rows are no pair
        lambda: jaxckpt.stack(block, "none", 3, scan=False)(
            X, split(WS, "none", 3, scan=False)
        ),
        "returns (carry, output)",
    ),
    "stack of a layer of three results": (
        lambda: jaxckpt.stack(lambda x, w: (x, x, w), "full", 3)(
            X, split(WS, "full", 3)
        ),
        "3 values",
    ),
    "stack of a layer that widens its carry": (
        lambda: jaxckpt.stack(lambda x, w: (jnp.tile(x, 2), None), "full", 3)(
            X, split(WS, "full", 3)
        ),
        "carry goes in as float32[2,4] and comes out as float32[2,8]",
    ),
    "stack of a layer that casts its carry": (
        lambda: jaxckpt.stack(
            lambda c, w: ({"x": c["x"].astype(jnp.bfloat16)}, None), "every:2", 3
        )({"x": X}, split(WS, "every:2", 3)),
        "the dtype of its carry: carry['x'] goes in as float32[2,4]",
    ),
    "stack of a layer whose carry is another tree": (
        lambda: jaxckpt.stack(lambda x, w: ((x, x), None), "none", 3)(
            X, split(WS, "none", 3)
        ),
        "PyTreeDef(*) goes in and PyTreeDef((*, *)) comes out",
    ),
    "Stack of a function": (
        lambda: jaxckpt.Stack(block, 3).init(jax.random.key(0), X),
        "block is not; jaxckpt.stack takes functions",
    ),
    "Stack of a partial function": (
        lambda: jaxckpt.Stack(functools.partial(block, w=W), 3).init(
            jax.random.key(0), X
        ),
        "functools.partial(Class, ...)",
    ),
    "Stack of a module": (
        lambda: jaxckpt.Stack(nn.Dense(4), 3).init(jax.random.key(0), X),
        "Dense is not",
    ),
    "split_layers of another depth": (lambda: split(WS, "full", 4), "axis of 4"),
    "split_layers of a scalar": (lambda: split(1.0, "full", 3), "axis of 3"),
    "split_layers of a list of layers": (
        lambda: split([W, W, W], "full", 3),
        "join_layers",
    ),
    "stack of more functions than layers": (
        lambda: jaxckpt.stack([layer] * 3, "full", 2),
        "some would never run",
    ),
    "join_layers of no kinds": (
        lambda: jaxckpt.join_layers([W] * 2, "full", 2, kinds=0),
        "kinds=0",
    ),
    "join_layers of half a kind": (
        lambda: jaxckpt.join_layers([W] * 2, "full", 2, kinds=1.5),
        "kinds=1.5",
    ),
    "join_layers of too few": (lambda: jaxckpt.join_layers([W], "full", 3), "1 layers"),
    "join_layers of unlike layers": (
        lambda: jaxckpt.join_layers([{"w": W}, {"v": W}], "full", 2),
        "layer",
    ),
    "join_layers of unlike shapes": (
        lambda: jaxckpt.join_layers([W, X], "full", 2),
        "layer",
    ),
    "join_layers of None": (lambda: jaxckpt.join_layers(None, "full", 3), "None"),
    "merge_layers of another layout": (
        lambda: jaxckpt.merge_layers({"run_0": WS}, "1xfull+2xnone", 3),
        "use split_layers",
    ),
    "merge_layers of stacked weights": (
        lambda: jaxckpt.merge_layers(WS, "full", 3),
        "use split_layers",
    ),
    "plan with no budget": (lambda: jaxckpt.plan(block, X, W, budget=0), "budget"),
    "plan with a budget below nothing": (
        lambda: jaxckpt.plan(block, X, W, budget=-1),
        "-1",
    ),
    "plan with half a byte": (lambda: jaxckpt.plan(block, X, W, budget=0.5), "0.5"),
    "plan with a budget of None": (
        lambda: jaxckpt.plan(block, X, W, budget=None),
        "None",
    ),
    "plan with a share": (lambda: jaxckpt.plan(block, X, W, budget="80%"), "80%"),
    "plan with a budget of nothing": (
        lambda: jaxckpt.plan(block, X, W, budget="0GiB"),
        "0GiB",
    ),
    "plan with an unknown unit": (
        lambda: jaxckpt.plan(block, X, W, budget="1QB"),
        "'QB'",
    ),
    "plan for no target": (
        lambda: jaxckpt.plan(block, X, W, budget="1GiB", target="h10:1"),
        "'h10'",
    ),
    "plan for text": (lambda: jaxckpt.plan("block", X, W, budget="1GiB"), "str"),
    "plan without arrays": (
        lambda: jaxckpt.plan(lambda: 1.0, budget="1GiB"),
        "no argument",
    ),
    "plan of integers": (
        lambda: jaxckpt.plan(lambda i: i + 1, jnp.arange(3), budget="1GiB"),
        "float",
    ),
    "plan of no layers": (
        lambda: jaxckpt.plan(layer, X, W, num_layers=0, budget="1GiB"),
        "0",
    ),
    "plan of a stack of one argument": (
        lambda: jaxckpt.plan(layer, X, num_layers=2, budget="1GiB"),
        "carry",
    ),
    "plan with offload of a function": (
        lambda: jaxckpt.plan(block, X, W, budget="1GiB", offload=True),
        "num_layers",
    ),
    "plan without compiles": (
        lambda: jaxckpt.plan(block, X, W, budget="1GiB", max_compiles=0),
        "max_compiles",
    ),
    "a plan file that is not there": (
        lambda: jaxckpt.Plan.load("none.json"),
        "none.json",
    ),
    "assert_peak_below no target": (
        lambda: testing.assert_peak_below(block, X, W, limit="1MiB", target="h10"),
        "h10",
    ),
    "assert_peak_below lots": (
        lambda: testing.assert_peak_below(block, X, W, limit="lots"),
        "'lots'",
    ),
    "assert_policy_applied of no policy": (
        lambda: testing.assert_policy_applied(block, "ful", W, X),
        "'full'",
    ),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_bad_call_is_a_value_error_of_one_line(kind):
    call, word = CALLS[kind]
    with pytest.raises((ValueError, TypeError)) as error:  # TypeError: no target
        call()
    assert "/jaxckpt/" in str(error.traceback[-1].path), repr(error.value)[:300]
    assert word in str(error.value) and len(str(error.value).splitlines()) == 1


def test_there_are_at_least_170_kinds():
    kinds = {line for line, *_ in COMMAND_LINES} | set(CALLS)
    assert len(kinds) == len(COMMAND_LINES) + len(CALLS) >= 170
