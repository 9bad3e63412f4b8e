"""Error codes: each class has its own permanent code, and each code a page."""

from __future__ import annotations

import pkgutil
import re
import traceback
from importlib import import_module
from pathlib import Path

import pytest

import vllm_fl
from vllm_fl import errors
from vllm_fl.errors import InvalidSettingError, MissingFileError, PluginError, VllmFLError
from vllm_fl.plugins.inspection import Finding
from vllm_fl_tools import cli
from vllm_fl_tools.cli._checks import INSTALL_CHECKS
from vllm_fl_tools.cli.doctor import CODES, FAILED_CHECK, error_code
from vllm_fl_tools.cli.explain import code_page, codes, title

PACKAGES = ("vllm_fl", "vllm_fl_tools", "vllm_fl_verify")
SOURCES = Path(vllm_fl.__file__).parent

OF_CLASSES = {
    "VllmFLError": "FL000",
    "SettingsError": "FL101",
    "InvalidSettingError": "FL102",
    "MissingFileError": "FL103",
    "IdleSwitchError": "FL104",
    "PluginError": "FL201",
    "DuplicateError": "FL202",
    "DeviceError": "FL203",
    "OwnerError": "FL204",
    "LoadingError": "FL205",
    "UnknownOpError": "FL301",
    "NoImplementationError": "FL302",
    "PolicySealedError": "FL303",
    "AllFailedError": "FL401",
    "CallError": "FL402",
    "NoKernelError": "FL403",
    "StartError": "FL501",
    "TargetError": "FL502",
    "ServingError": "FL504",
    "LockError": "FL505",
    "EngineError": "FL601",
    "AcceptError": "FL602",
    "BisectError": "FL603",
    "UsageError": "FL701",
    "NoTemporaryFolderError": "FL520",
}
"""Permanent, because people search for codes: only add lines, never change one."""

OF_FINDINGS = {
    "settings": "FL110",
    "entry-point": "FL210",
    "half-installed": "FL211",
    "owners": "FL212",
    "platforms": "FL213",
    "plugins": "FL214",
    "device": "FL215",
    "ended": "FL216",
    "lock": "FL505",
    "contracts": "FL217",
    "ops": "FL310",
    "vllm-range": "FL510",
    "vllm-plugins": "FL511",
    "vllm-target-device": "FL512",
    "engine": "FL514",
    "torch": "FL520",
    "torch-build": "FL521",
    "torch-companions": "FL522",
    "driver": "FL523",
    "table": "FL610",
}
"""Permanent too."""

OF_WARNINGS = {"FL410", "FL411", "FL412", "FL413", "FL503", "FL513"}
"""Codes that occur only in warnings."""

ALL = {*OF_CLASSES.values(), *OF_FINDINGS.values(), *OF_WARNINGS, "FL702"}


def classes() -> dict[str, type[VllmFLError]]:
    """Every error class of core, verify and tools; tests and plugins have others."""
    for module in pkgutil.iter_modules(cli.__path__):
        if module.name != "__main__":
            import_module(f"{cli.__name__}.{module.name}")
    found, rest = {}, [VllmFLError]
    while rest:
        cls = rest.pop()
        rest += cls.__subclasses__()
        if cls.__module__.partition(".")[0] in PACKAGES:
            found[cls.__name__] = cls
    return found


def test_each_class_has_a_code_of_its_own_which_does_not_change() -> None:
    assert {name: vars(cls).get("code") for name, cls in classes().items()} == OF_CLASSES
    assert len({*OF_CLASSES.values()}) == len(OF_CLASSES)


def test_each_check_of_doctor_has_a_code_which_does_not_change() -> None:
    assert (dict(CODES), FAILED_CHECK) == (OF_FINDINGS, "FL702")
    assert {name for name, _ in INSTALL_CHECKS} < set(OF_FINDINGS)


def test_codes_of_different_things_differ() -> None:
    # Startup, and every other verb, would fail with the same error.
    foretold = {OF_FINDINGS["lock"], OF_FINDINGS["torch"]}
    assert {*OF_CLASSES.values()} & {*OF_FINDINGS.values()} == foretold
    assert not OF_WARNINGS & {*OF_CLASSES.values(), *OF_FINDINGS.values()}


def test_no_line_of_a_log_has_a_code_that_nobody_explains() -> None:
    folders = (Path(import_module(name).__file__ or "").parent for name in PACKAGES)
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    found = set(re.findall(r"\bFL\d{3}\b", text))
    assert OF_WARNINGS <= found <= ALL


def test_core_raises_nothing_without_a_kind() -> None:
    for path in SOURCES.rglob("*.py"):
        calls = [line for line in path.read_text().splitlines() if "raise VllmFLError(" in line]
        # An error received from another process has its own code.
        assert [line for line in calls if 'code=value["code"]' not in line] == [], path


def test_each_code_has_a_page_and_each_page_a_code() -> None:
    assert set(codes()) == ALL


@pytest.mark.parametrize("code", sorted(ALL))
def test_a_page_says_what_causes_it_what_to_do_and_shows_a_message(code: str) -> None:
    text = code_page(code)
    assert text is not None
    heading, *_ = text.splitlines()
    assert heading == f"# {code}: {title(text)}" and title(text)
    sections = re.split(r"^## (.+)\n", text, flags=re.M)[1:]
    assert sections[::2] == ["What causes it", "What to do", "A message"]
    assert all(section.strip() for section in sections)
    assert f"[{code}]" in sections[-1]
    for cls in {name for name, own in OF_CLASSES.items() if own == code} & {*vars(errors)}:
        assert f"Error `{cls}`" in text
    for check in (check for check, own in OF_FINDINGS.items() if own == code):
        assert f"inding `{check}`" in text
    assert set(re.findall(r"\bFL\d{3}\b", text)) <= ALL
    assert max(map(len, text.splitlines())) < 80


def test_the_code_stands_at_the_end_of_the_first_line() -> None:
    error = PluginError("Plugin 'acme' failed.\nIts log:\n…", plugin="acme")
    assert str(error) == "Plugin 'acme' failed. [FL201]\nIts log:\n…"
    assert (error.code, error.message) == ("FL201", "Plugin 'acme' failed.\nIts log:\n…")
    assert error.args == (error.message,)


def test_the_code_of_an_error_of_other_kinds() -> None:
    class AcmeError(PluginError):
        pass

    missing = MissingFileError("'a.yaml' does not exist", key="config", origin="environment")
    assert str(missing) == "'a.yaml' does not exist [FL103]", "it is an OSError, too"
    assert str(AcmeError("no licence")) == "no licence [FL201]"
    of_another_process = VllmFLError("it does not exist", code="FL103")
    assert str(of_another_process) == "it does not exist [FL103]"


def test_a_traceback_says_how_to_read_the_page() -> None:
    try:
        raise InvalidSettingError("prefer: 'x'", key="prefer", origin="environment")
    except InvalidSettingError as error:
        text = "".join(traceback.format_exception(error))
    assert text.endswith("prefer: 'x' [FL102]\nRun `vllm-fl explain FL102` for causes and fixes.\n")


@pytest.mark.parametrize(
    ("check", "what", "code"),
    [
        ("torch", "torch is not installed.", "FL520"),
        ("settings", "fl.yaml:3: prefer: 'x' [FL102]", "FL102"),
        ("acme", "Acme's library is not installed.", None),
        ("own", "The check 'own' failed. [FL702]", "FL702"),
    ],
)
def test_a_finding_has_the_code_of_its_error_or_of_its_check(
    check: str, what: str, code: str | None
) -> None:
    assert error_code(Finding(check, what, "why", "todo")) == code
