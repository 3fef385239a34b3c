"""The configuration: every mistake is one line with the flag and what would do."""

import json
import subprocess
import sys

import pytest

from jaxckpt.models.presets import PRESETS, ConfigError, model_config
from jaxckpt.policies import PolicyError
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.divisible import check_divisible
from jaxckpt.training.mesh_sizes import parse_mesh, resolve_mesh


def error(function, *args, kind=ConfigError, **options) -> str:
    with pytest.raises(kind) as caught:
        function(*args, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def config(architecture=(), **fields) -> TrainConfig:
    return TrainConfig(
        architecture=model_config("tiny", **dict(architecture)), **fields
    )


# ---------------------------------------------------------------- meshes


@pytest.mark.parametrize(
    "text, sizes",
    [
        ("", {}),
        ("data:2", {"data": 2}),
        ("fsdp:4,tensor:2", {"fsdp": 4, "tensor": 2}),
        (" tensor : 2 , data : 1 ", {"tensor": 2, "data": 1}),
    ],
)
def test_parse_mesh(text, sizes):
    assert parse_mesh(text) == sizes


@pytest.mark.parametrize(
    "text, problem",
    [
        (
            "dta:2",
            "unknown axis 'dta'. Did you mean 'data'? "
            "Known: data, pipe, fsdp, context, tensor",
        ),
        ("data:2,data:4", "data is given twice"),
        ("data:2,", "unknown axis ''. Known: data, pipe, fsdp, context, tensor"),
        ("8", "unknown axis '8'. Known: data, pipe, fsdp, context, tensor"),
        *(
            (f"data{size}", "data needs a number of devices, as in data:2")
            for size in ("", ":", ":0", ":-2", ":x", ":2.0", ":2:2")
        ),
    ],
)
def test_parse_mesh_refuses(text, problem):
    assert error(parse_mesh, text) == f"--mesh={text}: {problem}"
    assert error(config, mesh=text) == f"--mesh={text}: {problem}"


def test_resolve_mesh():
    assert resolve_mesh("", 8) == {"fsdp": 8}
    assert resolve_mesh("data:2,tensor:4", 8) == {"data": 2, "tensor": 4}
    for there in 1, 4, 16:
        assert error(resolve_mesh, "data:2,tensor:4", there) == (
            f"--mesh=data:2,tensor:4 needs 8 devices and there are {there}; "
            "--virtual-devices=8 makes that many of a CPU (in a report, --target=cpu)"
        )


GQA = dict(num_heads=4, num_kv_heads=2)


@pytest.mark.parametrize(
    "architecture, fields, sizes, message",
    [
        (
            {},
            dict(batch_size=6),
            dict(data=2, fsdp=2),
            "--batch-size=6 does not divide over data x fsdp x accumulate = 4; "
            "use --batch-size=8",
        ),
        (
            {},
            dict(batch_size=12, accumulate=3),
            dict(fsdp=8),
            "--batch-size=12 does not divide over data x fsdp x accumulate = 24; "
            "use --batch-size=24",
        ),
        (
            dict(dim=36, head_dim=10),
            {},
            dict(fsdp=8),
            "--dim=36 does not divide over fsdp = 8; use --dim=40",
        ),
        (
            dict(dim=36, num_heads=2),
            {},
            dict(fsdp=4, tensor=2),
            "--dim=36 does not divide over fsdp x tensor = 8; use --dim=40",
        ),
        (
            GQA,
            {},
            dict(tensor=4),
            "--num-kv-heads=2 does not divide over tensor = 4; use --num-kv-heads=4",
        ),
        (
            {},
            dict(batch_size=6),
            dict(tensor=3),
            "--num-heads=4 does not divide over tensor = 3; no --num-heads does here; "
            "use a smaller --mesh",
        ),
        (
            dict(num_heads=6, head_dim=4, num_kv_heads=2),
            {},
            dict(tensor=4),
            "--num-heads=6 does not divide over tensor = 4; use --num-heads=8",
        ),
        (
            dict(num_heads=2, head_dim=6),
            {},
            dict(fsdp=8),
            "--num-heads=2 does not divide over what head_dim leaves of fsdp x tensor "
            "= 4; use --num-heads=4",
        ),
        (
            dict(mlp_dim=100),
            {},
            dict(fsdp=4, tensor=2),
            "--mlp-dim=100 does not divide over fsdp x tensor = 8; use --mlp-dim=104",
        ),
        (
            dict(vocab_size=257),
            {},
            dict(tensor=2),
            "--vocab-size=257 does not divide over tensor = 2; use --vocab-size=258",
        ),
        (
            {},
            dict(seq_len=50, sequence_parallel=True),
            dict(tensor=4),
            "--seq-len=50 does not divide over tensor = 4; use --seq-len=52",
        ),
        (
            dict(positions="learned", max_seq_len=50),
            dict(sequence_parallel=True),
            dict(tensor=4),
            "--seq-len=50 does not divide over tensor = 4; use --seq-len=48",
        ),
        (
            {},
            dict(seq_len=50),
            dict(context=4),
            "--seq-len=50 does not divide over 2 x context = 8; use --seq-len=56",
        ),
        (
            {},
            dict(seq_len=24, sequence_parallel=True),
            dict(context=4, tensor=4),
            "--seq-len=24 does not divide over context x tensor = 16; use --seq-len=32",
        ),
        (
            dict(mlp_dim=100),
            {},
            dict(fsdp=2, context=2, tensor=2),
            "--mlp-dim=100 does not divide over fsdp x context x tensor = 8; "
            "use --mlp-dim=104",
        ),
        (
            dict(attention_dropout=0.1),
            {},
            dict(context=2),
            "--attention-dropout=0.1 is not available with context:2 in --mesh; use "
            "--attention-dropout=0",
        ),
        (
            {},
            {},
            dict(pipe=2, context=2),
            "--mesh has both pipe and context, which do not go together; use fsdp or "
            "tensor in place of one",
        ),
    ],
)
def test_k2_sizes_that_do_not_divide(architecture, fields, sizes, message):
    assert error(check_divisible, config(architecture, **fields), sizes) == message


@pytest.mark.parametrize(
    "sizes",
    [{}, dict(data=2), dict(fsdp=2, tensor=4), dict(data=2, fsdp=2, tensor=2)],
)
def test_the_default_sizes_divide(sizes):
    check_divisible(config(sequence_parallel="tensor" in sizes), sizes)
    check_divisible(config(dict(max_seq_len=50)), sizes)  # only cut when asked


def test_n1_sequence_parallel_without_a_tensor_axis_is_refused():
    message = error(check_divisible, config(sequence_parallel=True), {"fsdp": 2})
    assert message.startswith("--sequence-parallel shards over the tensor axis")


def test_k2_a_batch_that_accumulation_does_not_divide():
    assert error(config, batch_size=7, accumulate=2) == (
        "--batch-size=7 does not divide by --accumulate=2; use --batch-size=8"
    )


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize(
    "field, value",
    [
        *((f, v) for f in ("steps", "batch_size", "accumulate", "eval_batches",
                           "keep_snapshots", "clip_norm") for v in (0, -1)),
        *((f, -1) for f in ("seq_len", "virtual_devices", "warmup_steps", "eval_every",
                            "snapshot_every", "weight_decay", "learning_rate", "seed")),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("clip_norm", float("nan")),
        ("weight_decay", float("inf")),
        ("seed", 2**31),
    ],
)  # fmt: skip
def test_n1_a_value_out_of_range_names_its_flag(field, value):
    message = error(config, **{field: value})
    assert message.startswith(f"--{field.replace('_', '-')}={value} ")


def test_n1_resume_needs_a_folder():
    assert error(config, resume=True).startswith("--resume needs --workdir")


def test_learned_positions_bound_the_sequence():
    learned = dict(positions="learned", max_seq_len=64)
    assert config(learned, seq_len=64).sequence_length == 64
    assert config(learned).sequence_length == 64
    assert error(config, learned, seq_len=65) == (
        "--seq-len=65 exceeds the model's 64 learned positions; use --seq-len=64 or "
        "less, or raise --max-seq-len"
    )
    assert config(dict(max_seq_len=64), seq_len=65).sequence_length == 65  # rotary


@pytest.mark.parametrize(
    "policy, layers, message",
    [
        ("dots_savable", 4, "unknown policy 'dots_savable'. Did you mean 'dots_saveab"),
        ("save:", 4, "an empty name in 'save:'"),
        (
            "save:contxt",
            4,
            "no value is named 'contxt' in this block. Did you mean 'co",
        ),
        ("every:5", 4, "every:5 groups more than the 4 layers"),
        ("3xfull", 4, "3xnothing_saveable plans 3 layers and the stack has 4"),
        ("every:0", 4, "every:K needs a whole number of layers, not '0'"),
        ("", 4, "an empty policy"),
        ("full:context", 4, "full takes no names"),
        ("none:4", 4, "none takes no names"),
        ("none/save:context", 4, "none takes no names: JAX has no policy that is both"),
        ("every:4/every:2", 4, "'every:2'"),
    ],
)
def test_n1_the_policy_is_checked_against_the_model(policy, layers, message):
    options = dict(architecture=dict(num_layers=layers), policy=policy)
    assert error(config, kind=PolicyError, **options).startswith(message)


def test_the_plan_is_of_the_model_s_depth():
    assert str(config(dict(num_layers=7), policy="sqrt").plan) == str(
        config(dict(num_layers=7), policy="every:2").plan
    )


# ---------------------------------------------------------------- presets


def test_every_preset_has_its_published_size():
    millions = {
        name: round(preset.num_params / 1e6, 1) for name, preset in PRESETS.items()
    }
    expected = {
        "gpt2-124m": 124.4, "gpt2-355m": 354.8, "gpt2-774m": 774.0,
        "gpt2-1.5b": 1557.6, "llama-7b": 6738.4, "llama-13b": 13015.9,
        "llama-70b": 68976.6, "llama3-8b": 8030.3, "llama3-70b": 70553.7,
    }  # fmt: skip
    assert {name: millions[name] for name in expected} == expected
    assert round(millions["gpt3-22b"] / 1e3) == 22
    assert round(millions["gpt3-175b"] / 1e3) == 175
    assert round(millions["gpt3-530b"] / 1e3) == 530
    assert round(millions["gpt3-1t"] / 1e3) in (1008, 1009)


def test_overrides_start_from_the_preset():
    config = model_config("llama3-8b", num_layers=2, dim=None)
    assert (config.num_layers, config.dim, config.kv_heads) == (2, 4096, 8)
    assert error(model_config, "llama-8b").startswith("unknown model 'llama-8b'. Did y")


@pytest.mark.parametrize(
    "overrides, named",
    [
        (dict(num_layers=0), "num_layers is 0"),
        (dict(dim=-1), "dim is -1"),
        (dict(dim=130), "dim 130 does not divide by num_heads 4: use dim 132"),
        (dict(num_kv_heads=3), "num_heads 4 does not divide by num_kv_heads 3"),
        (dict(num_kv_heads=-1), "num_kv_heads is -1"),
        (dict(dropout=1.0), "dropout is 1.0; it must be in [0, 1)"),
        (dict(head_dim=3), "rotary positions need an even head_dim, not 3"),
    ],
)
def test_n1_models_that_cannot_be(overrides, named):
    assert error(model_config, "tiny", **overrides).startswith(named)


def test_save_writes_every_field(tmp_path):
    saved = config(dict(num_layers=7), policy="sqrt", data=("a", "b"))
    saved.save(tmp_path / "config.json")
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["policy"] == "sqrt" and fields["data"] == ["a", "b"]
    assert fields["architecture"]["num_layers"] == 7


def test_configuring_does_not_import_jax():
    program = (
        "import sys\n"
        "from jaxckpt.training.config import TrainConfig\n"
        "TrainConfig(policy='sqrt')\n"
        "print([name for name in ('jax', 'flax', 'orbax') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert done.stdout == "[]\n"
