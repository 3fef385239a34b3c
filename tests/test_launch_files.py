"""The launch files are well formed, and their commands are ones that jaxckpt takes."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxckpt import command_line
from jaxckpt.models.presets import model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.mesh_sizes import resolve_mesh
from jaxckpt.training.processes import process_numbers

FOLDER = Path(__file__).parents[1] / "experiments" / "launch"
VARIABLES = {
    "WORKDIR": "/shared/run",
    "RESUME": "",
    "JOB_COMPLETION_INDEX": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SLURM_SUBMIT_DIR": "/home/me",
}


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def scripts():
    (task,), (_, job) = documents("skypilot.yaml"), documents("kubernetes.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["/bin/bash", "-c"]
    return {
        "slurm": (FOLDER / "slurm.sh").read_text(),
        "kubernetes": container["args"][0],
        "skypilot": task["run"],
    }


def run_bash(script, *options):
    return subprocess.run(
        ["bash", *options], input=script, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", ["slurm", "kubernetes", "skypilot"])
def test_the_command_is_one_that_train_takes(name):
    script = scripts()[name]
    assert run_bash(script, "-n").returncode == 0
    # As bash reads it: only the program is another one, which prints its arguments.
    command = script[script.index("python -m jaxckpt.train") :]
    command = re.sub(r"^python -m jaxckpt.train", r"printf '%s\\n'", command)
    done = run_bash(
        "".join(f"{key}={shlex.quote(text)}\n" for key, text in VARIABLES.items())
        + command
    )
    arguments = done.stdout.splitlines()
    assert done.returncode == 0 and len(arguments) >= 6, done.stderr
    default = TrainConfig(model="llama3-8b", architecture=model_config("llama3-8b"))
    config = command_line.parse(default, prog="train", args=arguments)
    assert config.workdir == "/shared/run"
    resolve_mesh(config.mesh, 16)
    if name != "slurm":
        assert process_numbers(config, {}) == (1, 2)
        assert config.coordinator_address.endswith(":8476")
    else:
        srun = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "1"}
        assert process_numbers(config, srun) == (1, 16)


def test_the_slurm_job_has_a_process_per_gpu():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", scripts()["slurm"], re.M))
    assert options["gres"] == f"gpu:{options['ntasks-per-node']}"
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) == 16


def test_the_kubernetes_job_is_indexed_and_its_pods_have_names():
    service, job = documents("kubernetes.yaml")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    address = f"--coordinator-address={name}-0.{pod['subdomain']}:"
    assert address in scripts()["kubernetes"]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_skypilot_task_has_as_many_gpus():
    (task,) = documents("skypilot.yaml")
    kind, gpus = task["resources"]["accelerators"].split(":")
    assert (kind, task["num_nodes"] * int(gpus)) == ("H100", 16)
    assert set(task["envs"]) == {"WORKDIR"} and task["workdir"] == "."
