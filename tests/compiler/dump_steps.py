"""Compile training steps of a small Transformer and keep what XLA says about them.

Runs in a process of its own, with ``JAX_PLATFORMS=cpu`` and ``XLA_FLAGS`` set to dump
into OUT/dump before JAX is imported.
Usage: python dump_steps.py OUT cpu|gpu POLICY...
Writes OUT/0, OUT/1, ... for the policies: step.hlo, ranges.txt, assignment.txt, and
facts.json with jaxpr FLOPs and bytes. GPU steps are for eight H100s that are not there.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax

from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.compiler.peak import find_peak_files
from jaxckpt.compiler.targets import parse_target
from jaxckpt.models.presets import model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.sharding import make_placement
from jaxckpt.training.step import make_program

SIZES = {"dim": 256, "num_heads": 4, "mlp_dim": 512, "compute_dtype": "bfloat16"}


def main(out: Path, platform: str, policies: list[str]) -> None:
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 4)
        devices, fsdp, model = jax.devices(), 4, model_config("tiny", attention="xla")
    else:
        devices, fsdp = parse_target("h100:8").devices(), 8
        model = model_config("tiny", attention="cudnn", **SIZES)
    placement = make_placement({"fsdp": fsdp}, devices)
    for number, policy in enumerate(policies):
        config = TrainConfig(
            policy=policy, architecture=model, batch_size=8, seq_len=128
        )
        program = make_program(config, placement)
        arguments = (program.state, program.batch)
        if platform == "cpu":
            compiled, _ = compile_step(program.step, *arguments, platform=platform)
        else:
            options = {"xla_gpu_collect_cost_model_stats": True}
            compiled = program.step.lower(*arguments).compile(compiler_options=options)
        folder = out / str(number)
        folder.mkdir()
        (folder / "step.hlo").write_text(compiled.as_text())
        ranges, assignment = find_peak_files(out / "dump")
        (folder / "ranges.txt").write_text(ranges.read_text())
        (folder / "assignment.txt").write_text(assignment.read_text())
        facts = {
            "flops": dataclasses.asdict(count_flops(program.step, *arguments)),
            "memory": memory_bytes(compiled).as_dict(),
            "xla_peak": compiled.memory_analysis().peak_memory_in_bytes,
            "layers": model.num_layers,
        }
        (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
