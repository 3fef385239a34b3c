"""Snapshots: alike under every plan and mesh, exact to resume, and their failures."""

import shutil

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxckpt.training import metrics as metrics_module
from jaxckpt.training.canonical import from_canonical, to_canonical
from jaxckpt.training.snapshot import SaveError, SnapshotError, Snapshots

# test_kill.py has the command's own compilation go on to the last bit.
pytestmark = [
    pytest.mark.usefixtures("compile_fast"),
    pytest.mark.xdist_group("snapshot"),  # what is made once is shared
]

LAYOUTS = [
    ("full", True),
    ("2xnone+3xsave:context", True),
    ("every:2", True),  # 2x2 and a remainder
    ("2x(1xfull+1xnone)+1xdots_saveable", True),
    ("every:2", False),
]


@pytest.fixture(scope="module")
def layout_program(compile_fast, make_config, programs):
    def make(policy, scan_layers, mesh="data:1"):
        layers = dict(num_layers=5, scan_layers=scan_layers)
        return programs(make_config(policy, architecture=layers), mesh)

    return make


def as_numpy(state):
    return jax.tree.map(np.asarray, {**state, "key": jax.random.key_data(state["key"])})


def made_up_state(program):
    """A state in which no two numbers are the same."""
    count = iter(range(10**6))

    def fill(leaf):
        values = next(count) + np.linspace(0, 1, leaf.size, dtype=np.float32)
        return values.reshape(leaf.shape).astype(leaf.dtype)

    state = jax.tree.map(fill, {**program.state, "key": jax.random.key_data(
        jax.random.key(7))})  # fmt: skip
    state = {**state, "key": jax.random.wrap_key_data(state["key"])}
    return jax.device_put(state, jax.tree.map(lambda a: a.sharding, program.state))


# ---------------------------------------------------------------- the canonical layout


@pytest.mark.parametrize("policy, scan_layers", LAYOUTS)
def test_m2_canonical_is_one_tree_per_layer_and_undone(
    layout_program, assert_same, policy, scan_layers
):
    program = layout_program(policy, scan_layers)
    state = made_up_state(program)
    canonical = to_canonical(program, state)
    layers = canonical["params"]["layers"]
    assert list(layers) == [f"layer_{index}" for index in range(5)]
    assert layers["layer_0"]["mlpwo"]["kernel"].shape == (64, 32)
    back = from_canonical(program, canonical)
    assert_same(as_numpy(back), as_numpy(state), rtol=0)
    for leaf, want in zip(
        jax.tree.leaves(back), jax.tree.leaves(program.state), strict=True
    ):
        assert leaf.sharding == want.sharding


@pytest.mark.parametrize("policy, scan_layers", LAYOUTS[1:])
def test_m2_the_layers_keep_their_order(
    layout_program, assert_same, policy, scan_layers
):
    plain, other = layout_program("none", True), layout_program(policy, scan_layers)
    canonical = to_canonical(plain, made_up_state(plain))
    there_and_back = to_canonical(other, from_canonical(other, canonical))
    assert_same(there_and_back, canonical, rtol=0)


def test_m1_another_mesh_holds_the_same_numbers(layout_program, assert_same):
    one = layout_program("every:2", True)
    many = layout_program("full", True, "data:2,fsdp:2,tensor:2")
    canonical = to_canonical(one, made_up_state(one))
    assert_same(to_canonical(many, from_canonical(many, canonical)), canonical, rtol=0)


def test_a_canonical_state_is_a_copy(make_config, programs, make_batch):
    program = programs(make_config())
    state = program.init()
    canonical = to_canonical(program, state)
    before = canonical["params"]["embedding"].copy()
    program.step(state, make_batch(program, seed=0))  # overwrites the state's buffers
    np.testing.assert_array_equal(canonical["params"]["embedding"], before)


def test_round_trip_through_a_folder(layout_program, assert_same, tmp_path):
    program, other = layout_program("every:2", True), layout_program("full", False)
    state = made_up_state(program)
    state["step"] = state["step"] * 0 + 5
    with Snapshots(tmp_path, keep=2) as snapshots:
        snapshots.save(program, state, position=40)
    with Snapshots(tmp_path, keep=2) as snapshots:
        saved = snapshots.read(other)
    assert (saved.step, saved.position) == (5, 40)
    assert_same(
        to_canonical(other, from_canonical(other, saved.state)),
        to_canonical(program, state),
        rtol=0,
    )


def test_only_the_last_snapshots_are_kept(make_config, programs, tmp_path):
    program = programs(make_config())
    state = program.init()
    with Snapshots(tmp_path, keep=2) as snapshots:
        for step in 3, 4, 7:
            state["step"] = jax.numpy.int32(step)
            snapshots.save(program, state, position=step)
            snapshots.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "7"]


# ---------------------------------------------------------------- resuming


DROPOUT = dict(dropout=0.3, attention_dropout=0.1)


@pytest.fixture(scope="module")
def straight(compile_fast, make_config, run_training, tmp_path_factory):
    """The folder and losses of 10 steps without interruption, snapshots at 5 and 10."""
    workdir = tmp_path_factory.mktemp("straight")
    config = make_config(
        "full", accumulate=2, snapshot_every=5, steps=10, architecture=DROPOUT
    )
    return workdir, run_training(config, workdir)


@pytest.mark.parametrize(
    "policy, layers, mesh, rtol",
    [
        ("full", {}, "data:1", 0),
        ("1xnone+2xdots_saveable", {}, "data:1", 1e-5),
        ("every:2", dict(scan_layers=False), "data:1", 1e-5),
        pytest.param(
            *("save:context", {}, "data:2,fsdp:2,tensor:2", 1e-5),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_m5_resuming_is_the_same_run(
    make_config, run_training, straight, tmp_path, policy, layers, mesh, rtol
):
    folder, losses = straight
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    shutil.rmtree(run / "snapshots" / "10")
    config = make_config(
        policy,
        accumulate=2,
        snapshot_every=5,
        steps=10,
        resume=True,
        workdir=str(run),
        architecture={**DROPOUT, **layers},
    )
    resumed = run_training(config, run, mesh)
    assert len(resumed) == len(losses) == 10
    assert resumed[:5] == losses[:5]
    np.testing.assert_allclose(resumed[5:], losses[5:], rtol=rtol, atol=0)
    assert len(set(losses)) == 10
    steps = sorted(path.name for path in (run / "snapshots").iterdir())
    assert steps == ["10", "5"]


def test_m3_a_restored_state_is_donated(make_config, programs, make_batch, tmp_path):
    """To the step after a restore too: it needs no second state.

    Whether a GPU's peak is the same, only a GPU can show: a CPU tells no peak.
    """
    program = programs(make_config())
    with Snapshots(tmp_path, keep=1) as snapshots:
        snapshots.save(program, program.init(), position=0)
    with Snapshots(tmp_path, keep=1) as snapshots:
        state = from_canonical(program, snapshots.read(program).state)

    def places(state):
        leaves = jax.tree.leaves((state["params"], state["opt_state"]))
        return sorted(leaf.unsafe_buffer_pointer() for leaf in leaves)

    before = places(state)
    after, _ = program.step(state, make_batch(program, seed=0))
    assert places(after) == before
    leaves = jax.tree.leaves((state["params"], state["opt_state"]))
    assert all(leaf.is_deleted() for leaf in leaves)


def test_l1_a_snapshot_under_an_active_mesh(layout_program, assert_same, tmp_path):
    """Of explicit axes, which are not the run's own, of Auto ones."""
    program = layout_program("full", True, "data:2,fsdp:2,tensor:2")
    state = made_up_state(program)
    kinds = {
        kind for x in jax.tree.leaves(state) for kind in x.sharding.mesh.axis_types
    }
    assert kinds == {AxisType.Auto}
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=2 * (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        with Snapshots(tmp_path, keep=1) as snapshots:
            snapshots.save(program, state, position=0)
        with Snapshots(tmp_path, keep=1) as snapshots:
            back = from_canonical(program, snapshots.read(program).state)
    assert_same(as_numpy(back), as_numpy(state), rtol=0)


# ---------------------------------------------------------------- what cannot be read


@pytest.fixture(scope="module")
def written(compile_fast, make_config, programs, tmp_path_factory):
    """A folder with the snapshot of step 0, and its program."""
    folder = tmp_path_factory.mktemp("written")
    program = programs(make_config())
    with Snapshots(folder, keep=1) as snapshots:
        snapshots.save(program, program.init(), position=0)
    return folder, program


def error(folder, program) -> str:
    with Snapshots(folder, keep=1) as snapshots:
        with pytest.raises(SnapshotError) as caught:
            snapshots.read(program)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and str(folder) in message
    return message


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_truncated_snapshot_is_named(written, tmp_path):
    folder, program = written
    data = [path for path in files_of(folder) if "/d/" in str(path)]
    assert data
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for path in data:
        cut = copy / path.relative_to(folder)
        cut.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    message = error(copy, program)
    assert message.startswith(f"snapshot {copy}/0 cannot be read; remove it")


def test_a_snapshot_without_one_of_its_files_is_named(written, tmp_path):
    folder, program = written
    names = {path.name for path in files_of(folder)}
    assert "manifest.ocdbt" in names and "_METADATA" in names
    for name in "manifest.ocdbt", "_METADATA", "metadata":
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        for path in copy.rglob(name):
            path.unlink()
        message = error(copy, program)
        assert f"snapshot {copy}/0 cannot be read" in message, name


def test_a_folder_without_snapshots(written, tmp_path):
    assert error(tmp_path, written[1]).startswith(f"no snapshot in {tmp_path}")


def test_a_foreign_folder(written, tmp_path):
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "weights").write_text("something")
    assert error(tmp_path, written[1]) == f"{tmp_path}/12 is no jaxckpt snapshot"


@pytest.mark.parametrize(
    "meta", ["{}", "[1]", '{"format": 99}', '{"format": 1, "position": "x"}', "{"]
)
def test_foreign_facts(written, tmp_path, meta):
    folder, program = written
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (file,) = [
        path for path in files_of(copy / "0" / "meta") if path.name == "metadata"
    ]
    file.write_text(meta)
    message = error(copy, program)
    assert f"{copy}/0" in message


@pytest.mark.parametrize(
    "architecture, named",
    [
        (dict(mlp_dim=128), "mlp_dim is 64 there and 128 here"),
        (dict(num_layers=2, num_kv_heads=1), "num_kv_heads is 2 there and 1 here; "
         "num_layers is 3 there and 2 here"),
        (dict(norm="layernorm"), "norm is rmsnorm there and layernorm here"),
        (dict(rope_theta=5.0), "rope_theta is 10000.0 there and 5.0 here"),
    ],
)  # fmt: skip
def test_another_model_is_refused_by_field(
    make_config, programs, written, architecture, named
):
    folder, _ = written
    message = error(folder, programs(make_config(architecture=architecture)))
    assert message == f"the snapshot in {folder} is of another model: {named}"


def test_what_only_changes_the_execution_may_differ(make_config, programs, written):
    execution = dict(
        dropout=0.1, compute_dtype="bfloat16", loss_chunks=2, scan_layers=False,
        num_kv_heads=2, head_dim=16, max_seq_len=32,
    )  # fmt: skip
    with Snapshots(written[0], keep=1) as snapshots:
        program = programs(make_config(architecture=execution, seq_len=16))
        assert snapshots.read(program).position == 0


# ---------------------------------------------------------------- failed saves


def replace_by_file(folder):
    folder.rename(folder.with_name("gone"))
    folder.write_text("in the way")


def test_a_failed_save_is_raised(written, tmp_path):
    program = written[1]
    with pytest.raises(SaveError, match=f"cannot be written to {tmp_path}/s: "):
        with Snapshots(tmp_path / "s", keep=2) as snapshots:
            replace_by_file(tmp_path / "s")
            snapshots.save(program, program.init(), position=0)


def test_a_write_that_fails_later(written, tmp_path, monkeypatch):
    def fail():
        raise OSError("disk full\nand more")

    snapshots = Snapshots(tmp_path, keep=2)
    monkeypatch.setattr(snapshots._manager, "wait_until_finished", fail)
    with pytest.raises(SaveError) as caught, snapshots:
        pass
    assert str(caught.value) == (
        f"a snapshot cannot be written to {tmp_path}: OSError: disk full"
    )
    with pytest.raises(ZeroDivisionError), snapshots:  # what ended the run comes first
        raise ZeroDivisionError


def test_a_snapshot_that_is_there_already(written, tmp_path):
    program = written[1]
    with Snapshots(tmp_path, keep=2) as snapshots:
        snapshots.save(program, program.init(), position=0)
        with pytest.raises(SaveError, match="holds a snapshot of step 0 or later"):
            snapshots.save(program, program.init(), position=0)


def test_a_failed_save_stops_the_run(make_config, run_training, tmp_path, monkeypatch):
    write = metrics_module.MetricsLog.write

    def write_and_block(self, record):
        write(self, record)
        if record["step"] == 3:  # between the snapshots of steps 2 and 4
            replace_by_file(tmp_path / "run" / "snapshots")

    monkeypatch.setattr(metrics_module.MetricsLog, "write", write_and_block)
    with pytest.raises(SaveError) as caught:
        run_training(make_config(steps=50, snapshot_every=2), tmp_path / "run")
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"a snapshot cannot be written to {tmp_path}/run/snap")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert 3 <= len(lines) < 50


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="no snapshots can go to .*file/s: Not a"):
        Snapshots(tmp_path / "file" / "s", keep=1)


def test_a_run_of_other_data_or_seed_is_not_continued(tmp_path, make_config, programs):
    program = programs(make_config())
    state = program.init()
    with Snapshots(tmp_path, 1, {"seed": 0, "data": "a", "steps": 5}) as snapshots:
        snapshots.save(program, state, 8)
    for facts, words in ({"seed": 1}, "seed was 0 and is 1"), ({"data": "b"}, "data"):
        with Snapshots(tmp_path, 1, facts) as snapshots:
            with pytest.raises(SnapshotError, match=words):
                snapshots.read(program)
    with Snapshots(tmp_path, 1, {"seed": 0, "data": "a", "steps": 9}) as snapshots:
        assert snapshots.read(program).changes == ("steps was 5 and is 9",)
