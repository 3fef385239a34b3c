"""The harness of JAX's own tests tells every verdict apart, on tests written here."""

import textwrap

import pytest

from tests import jax_own_tests

TESTS = """
import unittest
import jax
from jax._src.ad_checkpoint import checkpoint_name, nothing_of_that_name


class RematTest(unittest.TestCase):
    def test_good(self):
        self.assertEqual(jax.checkpoint(lambda x: 2 * x)(3), 6)

    def test_differs(self):
        called = jax.checkpoint(lambda x: self.assertNotIsInstance(x, float))(1.0)

    def test_new(self):
        jax.remat(lambda x: self.assertNotIsInstance(x, float), policy=None)(1.0)

    def test_of_another_version(self):
        nothing_of_that_name(jax.remat(abs)(1))

    @unittest.skip("for a reason")
    def test_skipped(self):
        pass

    def test_beside(self):
        pass


class OtherTest(unittest.TestCase):
    def test_named(self):
        checkpoint_name(1.0, "a")

    def test_of_something_else(self):
        self.fail("is not run")
"""


@pytest.mark.slow
def test_verdicts(tmp_path):
    (tmp_path / "small_test.py").write_text(TESTS)
    (tmp_path / "irrelevant_test.py").write_text("raise ValueError")
    known = {
        r"small_test.RematTest.test_differs": "numbers stay numbers",
        r"small_test.RematTest.test_good": "not at all",
    }
    found = {
        test.rpartition(".")[2]: (verdict, why)
        for test, verdict, why in jax_own_tests.verdicts(tmp_path, "", known)
    }
    assert {test: verdict for test, (verdict, _) in found.items()} == {
        "test_good": "no difference",
        "test_differs": "known difference",
        "test_new": "failed",
        "test_of_another_version": "unfit",
        "test_skipped": "skipped",
        "test_beside": "without remat",
        "test_named": "without remat",
    }
    assert found["test_differs"][1] == "numbers stay numbers"
    assert "1.0 is an instance of <class 'float'>" in found["test_new"][1]
    assert "'NoneType' object is not callable" in found["test_of_another_version"][1]


def test_the_summary_puts_tests_of_one_reason_together():
    found = [
        ("a", "passed", ""),
        ("b", "skipped", "no TPU"),
        ("c", "skipped", "no TPU"),
        ("d", "failed", "boom"),
    ]
    assert jax_own_tests.summary(found) == textwrap.dedent(
        """\
        skipped: b
        skipped: c
            no TPU
        failed: d
            boom
        1 passed, 2 skipped, 1 failed"""
    )
