"""JAX's own tests of `jax.checkpoint`, with `jaxckpt.remat` in its place.

    python -m tests.jax_own_tests FOLDER

FOLDER is the ``tests`` folder of JAX's sources, of the version installed or of one
near it; the tests are in no package (``pip install absl-py`` is what they need).
Every test that speaks of checkpoints, policies or `checkpoint_name` runs: the classes
``RematTest`` of ``api_test.py``, and the others wherever they are.

Each file runs in a process of its own, where ``jax.checkpoint`` and ``jax.remat`` are
`in_place_of_checkpoint`. What fails is run again with JAX's own checkpoint: a test
that fails with that as well says nothing of jaxckpt (it needs another version of JAX,
or a TPU). What is left must be in `KNOWN_DIFFERENCES`, and what is there must fail.

Exit code: 0, or 1 when a test fails that should not, or a known difference is none.
"""

import argparse
import collections
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

# Test, as a pattern that its whole name must match: why it has to fail.
KNOWN_DIFFERENCES = {
    r"api_test.Remat3?Test.test_concreteness_error_includes_user_code\w*": (
        "A number that is no array is not traced, so its sign is known: no error."
    ),
    r"api_test.RematTest.test_remat_of_cond_funky_custom_jvp": (
        "A number that is no array stays one, as without remat: it has no sum()."
    ),
    r"api_test.Remat3?Test.test_remat_(static_agnums_)?retracing": (
        "A function is traced once in each call, and sees what it closes over as it "
        "then is; under jit that is once in all."
    ),
    r"python_callback_test.\w+.test_cannot_use_io_callback_in_checkpoint": (
        "A number that is no array stays one, as without remat: given as "
        "the result of a callback it has no dtype."
    ),
    r"name_stack_test.\w+.test_re_materalization_appears_in_hlo": (
        "The word remat is in the program before it is differentiated: in the path of "
        "jaxckpt/remat.py, among the source lines."
    ),
    r"jaxpr_effects_test.\w+.test_remat_call_primitive_inherits_effects": (
        "An effect that must not run twice is an error of the call, not of its "
        "derivative only."
    ),
    r"api_test.Remat3Test.test_excess_precision_hell": (
        "A policy that saves more than JAX_REMAT3 lets it is an error, not full remat."
    ),
}

_SPEAKS_OF_CHECKPOINTS = re.compile(
    r"jax\.(remat|checkpoint)\b|checkpoint_name|checkpoint_policies"
)
_CANNOT_IMPORT = r"cannot import name '(\w+)' from '([\w.]+)'"
# A failure's last lines are enough to know it again.
_LONGEST_MESSAGE = 600


def in_place_of_checkpoint(fun, *, policy=None, concrete=False, **keywords):
    """`jaxckpt.remat` as `jax.checkpoint` is called.

    JAX's ``policy=None`` means full remat, which jaxckpt refuses to guess.
    """
    from jaxckpt import remat

    assert not concrete
    calls["remat"] += 1
    return remat(fun, "full" if policy is None else policy, **keywords)


calls: collections.Counter[str] = collections.Counter()


def put_in_place() -> None:
    """Puts the stand-in where JAX's tests look for `jax.checkpoint`."""
    import jax
    import jax.ad_checkpoint

    import jaxckpt.remat  # keeps the real one for itself  # noqa: F401

    for module in (jax, jax.ad_checkpoint):
        for name in ("checkpoint", "remat"):
            if hasattr(module, name):
                setattr(module, name, in_place_of_checkpoint)


def load(path: Path):
    """Imports a test file; what this JAX lacks of its imports becomes None.

    Only the tests that use the missing name fail then, with either checkpoint.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    while True:
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
            return module
        except ImportError as error:
            missing = re.search(_CANNOT_IMPORT, str(error))
            if missing is None:
                raise
            setattr(sys.modules[missing[2]], missing[1], None)


def tests_of(module, chosen: str, only: list[str] | None):
    """The tests of a file that speak of checkpoints, or those given."""
    for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
        for test in suite:
            name = test.id().partition(".")[2]
            if only is not None:
                wanted = name in only
            else:
                wanted = re.search(chosen, name) and speaks_of_checkpoints(test)
            if wanted:
                yield name, test


def speaks_of_checkpoints(test: unittest.TestCase) -> bool:
    if "Remat" in type(test).__name__:
        return True
    method = inspect.unwrap(getattr(type(test), test._testMethodName))
    # A parameterized test is a closure around the function that was written.
    written = [method, *(cell.cell_contents for cell in method.__closure__ or ())]
    sources = [inspect.getsource(one) for one in written if inspect.isfunction(one)]
    return any(_SPEAKS_OF_CHECKPOINTS.search(source) for source in sources)


def run_file(path: Path, chosen: str, only: list[str] | None, own: bool) -> dict:
    """Runs a file's tests in this process: name -> outcome, message, calls of remat."""
    if not own:
        put_in_place()
    results = {}
    for name, test in tests_of(load(path), chosen, only):
        calls.clear()
        outcome = unittest.TestResult()
        test.run(outcome)
        problems = [*outcome.errors, *outcome.failures]
        messages = [text for _, text in problems] or [r for _, r in outcome.skipped]
        results[name] = {
            "outcome": "failed" if problems else "skipped" if messages else "passed",
            "message": "".join(messages)[-_LONGEST_MESSAGE:],
            "calls": calls["remat"],
        }
    return results


def in_process(path: Path, chosen: str, only: list[str] | None = None, own=False):
    """`run_file` in a process of its own."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        request = {"chosen": chosen, "only": only, "own": own, "answer": answer.name}
        done = subprocess.run(
            [sys.executable, "-m", "tests.jax_own_tests", str(path), "--one-process"],
            input=json.dumps(request),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"JAX_PLATFORMS": "cpu", **os.environ},
        )
        text = answer.read()
    if text:
        return json.loads(text)
    last = done.stdout.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return {"(import)": {"outcome": "failed", "message": last[0], "calls": 0}}


def files(folder: Path) -> list[Path]:
    """A folder's test files that speak of checkpoints; of a file, that one."""
    found = [folder] if folder.is_file() else sorted(folder.glob("*_test.py"))
    return [path for path in found if _SPEAKS_OF_CHECKPOINTS.search(path.read_text())]


def verdicts(folder: Path, chosen: str, known: dict[str, str]):
    """Runs all files of a folder; yields (test, verdict, why).

    Verdicts: ``passed``, ``skipped``, ``unfit`` (fails with JAX's own checkpoint as
    well), ``known difference``, ``no difference`` (a known one that passes) and
    ``failed``.
    """
    for path in files(folder):
        results = in_process(path, chosen)
        failed = [name for name, one in results.items() if one["outcome"] == "failed"]
        own = in_process(path, chosen, failed, own=True) if failed else {}
        for name, result in results.items():
            test = f"{path.stem}.{name}"
            reasons = (why for one, why in known.items() if re.fullmatch(one, test))
            reason = next(reasons, "")
            if result["outcome"] == "skipped":
                yield test, "skipped", result["message"]
            elif result["outcome"] == "passed":
                passed = "passed" if result["calls"] else "without remat"
                yield test, "no difference" if reason else passed, reason
            elif own.get(name, result)["outcome"] != "passed":
                yield test, "unfit", own.get(name, result)["message"]
            elif reason:
                yield test, "known difference", reason
            else:
                yield test, "failed", result["message"]


def summary(found: list[tuple[str, str, str]]) -> str:
    """The verdicts, tests with the same reason together, and their numbers."""
    lines = []
    reasons = collections.defaultdict(list)
    for test, verdict, why in found:
        if verdict not in ("passed", "without remat"):
            reasons[verdict, why.strip()].append(test)
    for (verdict, why), tests in reasons.items():
        last = why.splitlines()[-1] if verdict == "unfit" else why
        lines += [f"{verdict}: {test}" for test in tests] + [f"    {last}"]
    counts = collections.Counter(verdict for _, verdict, _ in found)
    lines.append(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="JAX's tests/ folder, or one file")
    parser.add_argument("--only", default="", help="tests whose Class.name matches")
    parser.add_argument("--one-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one_process:
        request = json.load(sys.stdin)
        answer = Path(request.pop("answer"))
        sys.argv[1:] = []  # JAX's test files parse it
        answer.write_text(json.dumps(run_file(arguments.folder, **request)))
        return 0
    found = list(verdicts(arguments.folder, arguments.only, KNOWN_DIFFERENCES))
    print(summary(found))
    return int(any(verdict in ("failed", "no difference") for _, verdict, _ in found))


if __name__ == "__main__":
    sys.exit(main())
