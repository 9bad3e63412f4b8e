"""Verbs that distributions bring: found, named, and kept from harming one another."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from textwrap import dedent

import pytest
from commands import Command, Distribution

from vllm_fl.cli._verbs import ELSEWHERE, OWN
from vllm_fl.plugins.installed import entry_points

VERB = '''
"""`vllm-fl acme`: say what Acme's is, 100 % of it."""

def add_arguments(parser):
    parser.add_argument("--loud", action="store_true")

def run(arguments):
    print("a library says hello")
    from vllm_fl.cli.common import print_json, say
    print_json(acme=True) if arguments.json else say("ACME" if arguments.loud else "Acme")
    return 0
'''
numbers = itertools.count()

Bring = Callable[..., str]


@pytest.fixture
def bring(distribution: Distribution) -> Bring:
    """`bring("acme-verbs", "acme")`: a distribution with such a verb; gives its module's name."""

    def make(name: str, verb: str, source: str = VERB, release: str = "1.0") -> str:
        module = f"verb_module_{next(numbers)}"
        points = f"[vllm_fl.cli]\n{verb} = {module}\n"
        site = distribution(name, release, entry_points=points)
        (site / f"{module}.py").write_text(dedent(source))
        return module

    return make


def test_a_verb_of_another_distribution_runs(fl: Command, bring: Bring) -> None:
    bring("acme-verbs", "acme")
    assert fl("acme", "--loud").out == "ACME\n"
    done = fl("acme", "--json")
    assert done.json() == {"schema": 1, "acme": True}
    assert "hello" in done.err
    shown = " ".join(fl("--help").out.split())
    assert "acme say what Acme's is, 100 % of it" in shown
    assert "say what Acme's is, 100 % of it." in " ".join(fl("acme", "--help").out.split())


def test_a_verb_that_is_brought_twice_runs_for_neither(fl: Command, bring: Bring) -> None:
    bring("acme-verbs", "acme")
    bring("zeta-verbs", "acme", release="2.0")
    done = fl("acme")
    assert (done.status, done.out) == (1, "")
    told, more = done.err.splitlines()
    assert told == (
        "vllm-fl: `vllm-fl acme` is brought by acme-verbs 1.0 and by zeta-verbs 2.0, and runs for "
        "neither: uninstall one of them [FL703]"
    )
    assert "vllm-fl explain FL703" in more
    assert fl("policy").status == 0
    assert "acme-verbs 1.0 and by" in " ".join(fl("--help").out.split())


def test_a_verb_of_core_s_is_core_s(fl: Command, bring: Bring) -> None:
    bring("acme-verbs", "policy")
    done = fl("policy", "--json")
    assert done.status == 0 and "settings" in done.json()
    assert done.err == (
        "vllm-fl: acme-verbs 1.0 would bring the verb 'policy', too; it is vllm-fl-core's\n"
    )


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_mod"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_verb_whose_module_fails_is_named_and_costs_itself(
    fl: Command, bring: Bring, source: str, cause: str
) -> None:
    bring("acme-verbs", "acme", source)
    done = fl("acme", "--loud")
    assert (done.status, done.out) == (1, "")
    told, _ = done.err.splitlines()
    assert told.startswith(f"vllm-fl: `vllm-fl acme` of acme-verbs 1.0 cannot be imported: {cause}")
    assert fl("policy").status == 0
    help_ = fl("--help")
    assert help_.status == 0 and "cannot be imported" in " ".join(help_.out.split())


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        ("def run(arguments): return 0", "no add_arguments"),
        ("def add_arguments(parser): pass\nrun = 3", "no run"),
        ("", "no add_arguments and no run"),
    ],
)
def test_a_module_that_is_no_verb(fl: Command, bring: Bring, source: str, lacking: str) -> None:
    module = bring("acme-verbs", "acme", source)
    done = fl("acme")
    assert (done.status, done.out) == (1, "")
    told, _ = done.err.splitlines()
    assert f"of acme-verbs 1.0 is no verb: {module} has {lacking}. " in told
    assert fl("policy").status == 0


def test_only_the_verb_that_is_asked_for_is_imported(fl: Command, bring: Bring) -> None:
    bring("acme-verbs", "acme", "raise RuntimeError('imported')")
    assert fl("policy").err == ""


def test_core_has_its_verbs_without_metadata_too(
    fl: Command, bring: Bring, distribution: Distribution
) -> None:
    bring("acme-verbs", "policy", "raise RuntimeError('imported')")
    distribution("vllm-fl-core", version("vllm-fl-core"))  # found first, without entry points
    assert not [entry for entry in entry_points("vllm_fl.cli") if entry.name == "doctor"]
    done = fl("policy", "--json")
    assert done.status == 0 and done.json()
    assert "acme-verbs 1.0 would bring" in done.err


@pytest.mark.parametrize("verb", ELSEWHERE)
def test_a_well_known_verb_that_is_not_installed_says_what_installs_it(
    fl: Command, distribution: Distribution, verb: str
) -> None:
    distribution("vllm-fl-tools")  # found first, without entry points
    done = fl(verb, "--json")
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        f"vllm-fl: `vllm-fl {verb}` is not installed; vllm-fl-tools brings it: "
        "pip install vllm-fl-tools, or 'vllm-fl-core[tools]' [FL701]\n"
    )


def test_core_s_verbs_are_those_of_its_entry_points() -> None:
    told = [entry for entry in entry_points("vllm_fl.cli") if entry.dist.name == "vllm-fl-core"]
    assert {entry.name: entry.value for entry in told} == {
        name: f"vllm_fl.cli.{name}" for name in OWN
    }, "OWN of cli/_verbs.py, or pyproject.toml as it was last installed (`nox -s dev`), lacks one"


def test_help_of_all_verbs_needs_no_torch() -> None:
    code = (
        "import sys\nfrom vllm_fl.cli import main\n"
        "try:\n main(['--help'])\nexcept SystemExit:\n pass\n"
        "assert not {'torch', 'vllm', 'triton', 'numpy', 'matplotlib'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
