"""The four layers of settings: precedence, errors with their origin, and pickling."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from builders import PLUGIN_SETTINGS, silu
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_fl.contracts.binding import Binding
from vllm_fl.errors import SettingsError
from vllm_fl.settings import loading
from vllm_fl.settings.loading import load_startup, policy_from_config
from vllm_fl.settings.names import check_names
from vllm_fl.settings.policy import OpOrder
from vllm_fl.settings.schema import ITEMS, Settings, file_keys, overridden, variables
from vllm_fl.settings.values import normalise_platform

OPS = ("silu_and_mul", "gelu_and_mul", "rms_norm", "rotary_embedding", "attention_backend")
DECLARED = {**ITEMS, **{spec.key: spec for spec in PLUGIN_SETTINGS}}
VARIABLES = variables(DECLARED)
load_settings = partial(loading.load_settings, plugins=PLUGIN_SETTINGS)
BOOLEANS = [item.variable for item in DECLARED.values() if isinstance(item.default, bool)]

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def refused(env: dict[str, str], *files: tuple[str, str], key: str, origin: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(env, platform="cuda", platform_files=files)
    assert (caught.value.key, caught.value.origin) == (key, origin)
    assert str(caught.value).startswith(f"{origin}: {key}: ")
    assert "\n" not in caught.value.message
    return str(caught.value)


# Layers.


def test_environment_beats_platform_beats_default(write: Write) -> None:
    path = write("cuda.yaml", "prefer: reference\nstrict: true\ndeny_vendors: [a, b]\n")
    files = [("acme 1.0", path)]
    settings = load_settings({"VLLM_FL_PREFER": "vendor"}, platform_files=files)
    assert settings["prefer"].value == "vendor"
    assert settings["prefer"].origin == "environment VLLM_FL_PREFER"
    assert settings["prefer"].overrides == (
        ("reference", f"{path}:1 (acme 1.0)"),
        ("flagos", "default"),
    )
    assert settings["strict"].origin == f"{path}:2 (acme 1.0)"
    assert settings.policy.strict is True
    assert settings.policy.deny_vendors == {"a", "b"}
    assert settings["allow_vendors"].origin == "default"
    assert settings["platform_files"].value == (f"{path} (acme 1.0)",)


def test_order_of_each_op_is_an_item(write: Write) -> None:
    platform = write("p.yaml", "op_backends:\n  a: [flagos]\n  b: [flagos]\n  c: [flagos]\n")
    config = write("ops.json", '{"a": "vendor", "d": {"eager": ["reference"]}}')
    env = {"VLLM_FL_PER_OP": "a=reference|vendor:x; b = reference;", "VLLM_FL_OP_CONFIG": config}
    settings = load_settings(env, platform_files=[("acme", platform)])
    orders = settings.policy.per_op_order
    assert {op: str(order) for op, order in orders.items()} == {
        "a": "vendor",
        "b": "reference",
        "c": "flagos",
        "d": "eager reference, compiled (default order)",
    }
    assert {op for op, order in orders.items() if order.pinned} == {"a", "b", "d"}
    assert settings["op_backends.a"].origin == f"{config}:1 (environment VLLM_FL_OP_CONFIG)"
    assert [origin for _, origin in settings["op_backends.a"].overrides] == [
        "environment VLLM_FL_PER_OP",
        f"{platform}:2 (acme)",
    ]


@pytest.mark.parametrize(
    ("env", "platform_prefer", "expected"),
    [
        ({}, "vendor", "flagos|vendor|reference"),
        ({"VLLM_FL_PREFER": "reference"}, "vendor", "reference|flagos|vendor"),
        ({"VLLM_FL_PREFER": "vendor"}, None, "vendor|flagos|reference"),
    ],
)
def test_only_a_higher_preference_re_sorts_a_platforms_list(
    write: Write, env: dict[str, str], platform_prefer: str | None, expected: str
) -> None:
    text = "op_backends: {rms_norm: [flagos, vendor, reference]}\n"
    path = write("p.yaml", text + (f"prefer: {platform_prefer}\n" if platform_prefer else ""))
    setting = load_settings(env, platform_files=[("acme", path)])["op_backends.rms_norm"]
    assert str(setting.value) == expected
    assert setting.origin.endswith("re-sorted by environment VLLM_FL_PREFER") == bool(env)
    if env:
        (before, origin), *_ = setting.overrides
        assert (str(before), origin) == ("flagos|vendor|reference", f"{path}:1 (acme)")


def test_another_plugins_platform_is_left_as_it_is_until_somebody_asks(write: Write) -> None:
    settings = load_settings(platform="acme", foreign=True)
    assert settings.policy.prefer == "stock"
    assert settings["prefer"].origin == "another plugin's platform, without a policy file"
    assert [*map(str, settings.policy.order("rms_norm", engine=True))] == ["foreign", "stock"]
    assert [*map(str, settings.policy.order("rms_norm"))] == ["flagos", "vendor", "reference"]
    own = write("own.yaml", "op_backends: {rms_norm: [vendor:acme, foreign]}\n")
    shipped = [("vllm-acme", write("acme.yaml", "strict: false\n"))]
    for env, files, prefer in (
        ({"VLLM_FL_PREFER": "vendor"}, [], "vendor"),
        ({"VLLM_FL_CONFIG": own}, [], "stock"),
        ({"VLLM_FL_CONFIG": own}, shipped, "stock"),
        ({}, shipped, "flagos"),
    ):
        made = load_settings(env, platform="acme", platform_files=files, foreign=True)
        assert made.policy.prefer == prefer


def test_what_the_user_wrote_is_never_re_sorted(write: Write) -> None:
    for source, value in {
        "VLLM_FL_PER_OP": "rms_norm=flagos|vendor",
        "VLLM_FL_OP_CONFIG": write("o.json", '{"rms_norm": ["flagos", "vendor"]}'),
        "VLLM_FL_CONFIG": write("c.yaml", "op_backends: {rms_norm: [flagos, vendor]}"),
    }.items():
        policy = load_settings({source: value, "VLLM_FL_PREFER": "vendor"}).policy
        for each in (policy, policy.preferring("vendor")):
            assert str(each.per_op_order["rms_norm"]) == "flagos|vendor"


def test_vllm_fl_config_is_a_complete_override(write: Write) -> None:
    config = write("c.yaml", "prefer: reference\nflagos_blacklist: [mm]\n")
    platform = write(
        "p.yaml", "strict: true\nflagos_blacklist: [mm, add, sub]\nop_backends: {a: vendor}\n"
    )
    env = {
        "VLLM_FL_CONFIG": config,
        "VLLM_FL_PREFER": "nonsense",
        "VLLM_FL_STRICT": "0",
        "VLLM_FL_PER_OP": "rms_norm=flagos",
        "VLLM_FL_OP_CONFIG": "/does/not/exist",
        "VLLM_FL_ALLOW_VENDORS": "x",
        "VLLM_FL_FLAGOS_BLACKLIST_APPEND": "exp",
        "VLLM_FL_OOT_BLACKLIST": "RMSNorm",
        "VLLM_FL_PREFLIGHT": "off",
        "USE_FLAGGEMS": "0",
        "VLLM_FL_OOT_ENABLED": "0",
    }
    settings = load_settings(env, platform_files=[("acme", platform)])
    assert settings.policy.prefer == "reference"
    assert settings.policy.strict is False
    assert settings.policy.per_op_order == {}
    assert settings.policy.allow_vendors is None and settings.policy.deny_vendors == frozenset()
    assert settings["flagos_blacklist"].value == ("mm",)
    assert settings.oot_blacklist == ()
    # Files cannot set these, so a file does not override them.
    assert settings.preflight == "off"
    assert settings["use_flaggems"].value is settings.oot_enabled is False
    (warning,) = settings.warnings
    for name in set(env) & set(overridden(DECLARED)):
        assert name in warning
    for name in ("VLLM_FL_PREFLIGHT", "USE_FLAGGEMS", "VLLM_FL_OOT_ENABLED"):
        assert name not in warning
    assert f"{platform} (acme)" in warning
    assert settings["strict"].overrides == (("0", "environment VLLM_FL_STRICT"),)
    assert settings["prefer"].overrides[0] == ("nonsense", "environment VLLM_FL_PREFER")


def test_config_overrides_a_broken_platform_file_and_says_so(write: Write) -> None:
    env = {"VLLM_FL_CONFIG": write("c.yaml", "# nothing\n")}
    broken = write("p.yaml", "prefer: [")
    settings = load_settings(env, platform_files=[("acme", broken)])
    assert settings.policy.prefer == "flagos"
    assert f"ignored: {broken} (acme)." in settings.warnings[0]
    refused({}, ("acme", "/gone.yaml"), key="platform_files", origin="/gone.yaml (acme)")


# Whitelists and blacklists.


@pytest.mark.parametrize("prefix", ["flagos", "oot"])
def test_a_whitelist_a_blacklist_or_an_error(write: Write, prefix: str) -> None:
    white, black = (f"VLLM_FL_{prefix.upper()}_{c}LIST" for c in ("WHITE", "BLACK"))
    path = write("p.yaml", f"{prefix}_blacklist: [a, b]")
    settings = load_settings({white: "c"}, platform_files=[("acme", path)])
    assert settings[f"{prefix}_whitelist"].value == ("c",)
    assert settings[f"{prefix}_blacklist"].value == ()
    assert settings[f"{prefix}_blacklist"].overrides == ((("a", "b"), f"{path}:1 (acme)"),)
    assert settings[f"{prefix}_blacklist"].origin == f"cleared by {prefix}_whitelist"
    files = [("acme", write("p.yaml", f"{prefix}_whitelist: [a]"))]
    settings = load_settings({black: "b"}, platform_files=files)
    assert settings[f"{prefix}_whitelist"].value is None
    assert settings[f"{prefix}_blacklist"].value == ("b",)
    key = f"{prefix}_whitelist"
    assert black in refused({white: "a", black: "b"}, key=key, origin=f"environment {white}")
    path = write("c.yaml", f"{prefix}_blacklist: [a]\n{prefix}_whitelist: [b]\n")
    refused({"VLLM_FL_CONFIG": path}, key=key, origin=f"{path}:2")
    refused({}, ("acme", path), key=key, origin=f"{path}:2 (acme)")


# Files of several plugins.


@pytest.mark.parametrize(
    ("one", "other", "key", "value"),
    [
        ("prefer: vendor", "prefer: reference", "prefer", "flagos"),
        ("strict: true", "strict: false", "strict", False),
        ("oot_whitelist: [a, b]", "oot_whitelist: [b, c]", "oot_whitelist", ("b",)),
    ],
)
def test_two_plugins_that_differ_end_nothing_and_both_are_named(
    write: Write, one: str, other: str, key: str, value: object
) -> None:
    a, b = write("a.yaml", one), write("b.yaml", f"# second\n{other}")
    setting = load_settings({}, platform_files=[("a 1", a), ("b 2", b)])[key]
    assert setting.value == value
    assert f"{a}:1 (a 1)" in setting.origin and f"{b}:2 (b 2)" in setting.origin
    assert [origin for _, origin in setting.overrides][:2] == [f"{a}:1 (a 1)", f"{b}:2 (b 2)"]
    assert load_settings({}, platform_files=[("b 2", b), ("a 1", a)])[key] == setting


def test_a_plugins_whitelist_goes_without_anothers_blacklist(write: Write) -> None:
    a, b = write("a.yaml", "oot_whitelist: [x, y]"), write("b.yaml", "oot_blacklist: [y]")
    settings = load_settings({}, platform_files=[("a", a), ("b", b)])
    assert settings.oot_whitelist == ("x",)
    assert settings.oot_blacklist == ()
    assert settings["oot_whitelist"].origin == f"{a}:1 (a), without the names in {b}:1 (b)"


# Environment.


@pytest.mark.parametrize("variable", BOOLEANS)
def test_boolean(variable: str) -> None:
    (key,) = (key for key, item in DECLARED.items() if item.variable == variable)
    for value, texts in ((True, "1 true True YES on"), (False, "0 false FALSE No off")):
        for text in (*texts.split(), f" {texts[0]}\n"):
            assert load_settings({variable: text})[key].value is value
    for text in ("2", "enabled", "truee", "-1", "1;"):
        refused({variable: text}, key=key, origin=f"environment {variable}")


def test_empty_is_unset_and_only_for_plugins_none() -> None:
    for variable in VARIABLES:
        for blank in ("", "  "):
            settings = load_settings({variable: blank})
            if variable == "VLLM_FL_PLUGINS":
                assert settings.plugins == ()
            else:
                assert settings == load_settings({}), variable
    assert load_settings({"VLLM_FL_PLUGINS": "a-b, c.d,,a-b"}).plugins == ("a-b", "c.d")


@pytest.mark.parametrize(
    ("variable", "text", "key", "said"),
    [
        ("VLLM_FL_PREFER", "cuda", "prefer", "expected one of flagos, vendor, reference, stock"),
        ("VLLM_FL_PREFER", "flagso", "prefer", "Did you mean 'flagos'?"),
        ("VLLM_FL_LOG_LEVEL", "WARN", "log_level", "Did you mean 'WARNING'?"),
        ("VLLM_FL_PREFLIGHT", "verfy", "preflight", "Did you mean 'verify'?"),
        ("VLLM_FL_PREFLIGHT", "all", "preflight", "expected one of verify, full, run, off"),
        ("VLLM_FL_PLATFORM", "cu da", "platform", "cuda, cpu, rocm, tpu, xpu, ascend"),
        ("VLLM_FL_FLAGOS_BLACKLIST", "mm add", "flagos_blacklist", "'mm add' is not a valid name"),
        ("VLLM_FL_ALLOW_VENDORS", ",", "allow_vendors", "contains no name"),
        ("VLLM_FL_PER_OP", "rms_norm", "per_op", "op1=a|b;op2=x"),
        ("VLLM_FL_PER_OP", "a=flagos;a=vendor", "op_backends.a", "is set twice"),
        ("VLLM_FL_PER_OP", "a=", "op_backends.a", "is not a valid selector"),
        ("VLLM_FL_PER_OP", "a=flagos|flagos", "op_backends.a", "is listed twice"),
        ("VLLM_FL_PER_OP", "a=refrence", "op_backends.a", "Did you mean 'reference'?"),
        ("VLLM_FL_PER_OP", "a=native", "op_backends.a", "Did you mean 'stock'?"),
        ("VLLM_FL_PER_OP", "a=acme", "op_backends.a", "A vendor is vendor:acme."),
        ("VLLM_FL_CONFIG", "/gone.yaml", "config", "does not exist"),
        ("VLLM_FL_CONFIG", "gone.yaml", "config", "relative to the working directory"),
        ("VLLM_FL_OP_CONFIG", "/gone.json", "op_config", "does not exist"),
        ("VLLM_FL_CONFIG", "/dev/zero", "config", "not a regular file"),
        ("VLLM_FL_CONFIG", "a\0b", "config", "unprintable"),
        ("FLAGCX_PATH", "/a\udc80", "flagcx_path", "unprintable"),
    ],
)
def test_environment_refuses(variable: str, text: str, key: str, said: str) -> None:
    assert said in refused({variable: text}, key=key, origin=f"environment {variable}")


@pytest.mark.parametrize("name", ["VLLM_FL_ENABLED", "VLLM_FL_PREFER_ENABLED"])
def test_two_names_of_one_variable(name: str) -> None:
    assert load_startup({name: "false"}).enabled is False
    both = {"VLLM_FL_ENABLED": "false", "VLLM_FL_PREFER_ENABLED": "0"}
    both[name] = "true"
    assert load_startup(both).enabled is False
    assert load_startup(dict.fromkeys(both, "true")).enabled


def test_calls_are_counted_without_a_debug_log() -> None:
    assert [load_settings({}).counts_calls, load_startup({}).debug] == [False, False]
    assert load_settings({"VLLM_FL_COUNT_CALLS": "1"}).counts_calls
    assert load_settings({"VLLM_FL_DISPATCH_DEBUG": "1"}).counts_calls


def test_the_command_line_has_priority(write: Write) -> None:
    config = write("fl.yaml", "op_backends: {a: stock, c: stock}")
    settings = load_settings(
        {"VLLM_FL_CONFIG": config, "VLLM_FL_PER_OP": "b=stock"},
        orders={"group:g": "flagos|vendor", "c": ["reference"]},
        groups={"g": ["a", "b"]},
    )
    orders = {op: [*map(str, order.every)] for op, order in settings.policy.per_op_order.items()}
    assert orders == {"a": ["flagos", "vendor"], "b": ["flagos", "vendor"], "c": ["reference"]}
    assert settings["op_backends.c"].overrides[0][1].endswith("fl.yaml:1")
    for orders in ({"strict": True}, {"a": "native"}, {"a b": "stock"}):
        with pytest.raises(SettingsError, match="additional-config") as caught:
            load_settings(orders=orders)
        assert caught.value.origin == "--additional-config.vllm_fl"


def test_unknown_variables_are_named() -> None:
    env = {"VLLM_FL_PERFER": "vendor", "VLLM_FL_FLUX_CAPACITOR": "1", "VLLM_FLAGS": "1"}
    near, far = sorted(load_settings(env).warnings, reverse=True)
    assert near.startswith("VLLM_FL_PERFER") and near.endswith("Did you mean 'VLLM_FL_PREFER'?")
    assert far.startswith("VLLM_FL_FLUX_CAPACITOR") and far.endswith("it has no effect.")


def test_platform(write: Write) -> None:
    names = ("NVIDIA", "npu", " Cuda ", "cpu", "acme")
    assert [*map(normalise_platform, names)] == ["cuda", "ascend", "cuda", "cpu", "acme"]
    settings = load_settings({"VLLM_FL_PLATFORM": "NPU"}, platform="nvidia")
    assert settings.platform == "ascend"
    assert settings["platform"].overrides == (("cuda", "detected"),)
    assert load_startup({"VLLM_FL_PLATFORM": "NPU"}).platform == "ascend"
    detected = load_settings({}, platform="nvidia")["platform"]
    assert (detected.value, detected.origin) == ("cuda", "detected")
    env = {"VLLM_FL_PLATFORM": "asced"}
    (warning,) = load_settings(env, platform="cuda").warnings
    assert "asced" in warning and "Did you mean 'ascend'?" in warning
    files = [("acme", write("a.yaml", ""))]
    assert load_settings(env, platform_files=files).warnings == ()


def test_startup_reads_no_file_and_only_its_own() -> None:
    env = {
        "VLLM_FL_CONFIG": "/gone",
        "VLLM_FL_PREFER": "nonsense",
        "VLLM_FL_PREFER_ENABLED": "no",
        "VLLM_FL_PLUGINS": "a",
        "VLLM_FL_PLUGIN_MODULES": "b",
        "VLLM_FL_LOG_LEVEL": "debug",
        "VLLM_FL_DISPATCH_DEBUG": "1",
    }
    startup = load_startup(env)
    assert (startup.enabled, startup.debug) == (False, True)
    assert (startup.plugins, startup.plugin_modules) == (("a",), ("b",))
    assert (startup.platform, startup.log_level) == (None, "DEBUG")
    with pytest.raises(SettingsError) as caught:
        load_startup({"VLLM_FL_PREFER_ENABLED": "maybe"})
    assert caught.value.key == "enabled"


# Files.


@pytest.mark.parametrize(
    ("text", "line", "key", "said"),
    [
        ("prefer: vendor\nstrikt: true", 2, "strikt", "Did you mean 'strict'?"),
        ("prefer: vendor\nprefer: flagos", 2, "config", "is set twice, first on line 1"),
        ("op_backends:\n  m: [flagos]\n  m: [vendor]", 3, "config", "first on line 2"),
        ("prefer: 1", 1, "prefer", "expected one of flagos, vendor, reference"),
        ("strict: 1", 1, "strict", "expected true or false"),
        ("strict: !!bool [a]", 1, "config", "expected a scalar node"),
        ("deny_vendors: 5", 1, "deny_vendors", "expected a list of names"),
        ("deny_vendors: ','", 1, "deny_vendors", "contains no name"),
        ("deny_vendors:\n- a\n- 5\n", 1, "deny_vendors", "expected a name, got 5 (int"),
        ("deny_vendors:\n- a\n- no\n", 1, "deny_vendors", "in quotes it is text"),
        ("deny_vendors: ['a b']", 1, "deny_vendors", "is not a valid name"),
        ("op_backends: [a]", 1, "op_backends", "expected a mapping of ops"),
        ("op_backends:\n  a-b: [flagos]", 2, "op_backends.a-b", "is not a valid op name"),
        ("op_backends:\n  m: [flagos,\n  refrence]", 2, "op_backends.m", "'reference'"),
        ("op_backends:\n  m: {eager: }", 2, "op_backends.m", "got nothing"),
        ("op_backends:\n  m: flagos|refrence", 2, "op_backends.m", "'reference'"),
        ("op_backends:\n  m:\n  - vendor: cuda", 2, "op_backends.m", "no space after its colon"),
        ("op_backends:\n  m: {eagre: [flagos]}", 2, "op_backends.m", "Did you mean 'eager'?"),
        ("op_backends:\n  m: [flagos, flagos]", 2, "op_backends.m", "is listed twice"),
        ("op_backends:\n  m:\n    <=8: stock\n    <=8: flagos", 4, "config", "line 3"),
        ("op_backends:\n  m:\n    eager:\n      <=0: stock", 2, "op_backends.m", "at least 1"),
        ("op_backends:\n  m: {}", 2, "op_backends.m", "got none"),
        ("op_backends:\n  group:a b: [stock]", 2, "op_backends.group:a b", "not a valid op name"),
        ("op_backends:\n  group:g: [stok]", 2, "op_backends.group:g", "Did you mean 'stock'?"),
        ("op_backends: {default: {<=8: stock, rest: vendor}}", 1, "op_backends.default", "on size"),
        ("extends: vendor", 1, "extends", "expected platform, got the text 'vendor'"),
        ("extends: [platform]", 1, "extends", "got a list"),
        ("extends:", 1, "extends", "got nothing"),
        ("op_backends:\n  m: {8: stock, rest: stock}", 2, "config", "expected text"),
        ("preflight: run", 1, "preflight", "the variable VLLM_FL_PREFLIGHT"),
        ("VLLM_FL_PREFER: vendor", 1, "VLLM_FL_PREFER", "In a file, use prefer."),
        ("silu_and_mul: [vendor]", 1, "silu_and_mul", "an op: write it under op_backends"),
        ("io_dump: {}", 1, "io_dump", "Known: prefer, strict"),
        ("? [a]\n: b", 1, "config", "expected text as a key"),
        ("<<: {strict: true}", 1, "config", "merge keys"),
        ("- a", 1, "config", "expected a mapping of settings, got a list"),
        ("prefer: [", 1, "config", "invalid YAML"),
        ("prefer: *gone", 1, "config", "undefined alias"),
        ("prefer: vendor\n---\nprefer: flagos", 2, "config", "single document"),
        ("prefer: vendor\n# \a", 1, "config", "unacceptable character"),
        ("prefer: !!python/object/apply:os.getcwd []", 1, "config", "could not determine"),
        ("[" * 1200, 1, "config", "nested too deeply"),
    ],
)
def test_user_file_refuses(write: Write, text: str, line: int, key: str, said: str) -> None:
    path = write("c.yaml", text)
    assert said in refused({"VLLM_FL_CONFIG": path}, key=key, origin=f"{path}:{line}")
    with pytest.raises(SettingsError) as caught:
        policy_from_config(path)
    assert (caught.value.key, caught.value.origin) == (key, f"{path}:{line}")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "cannot be read: .*position 8"),
        ("prefer: vendor".encode("utf-16"), "cannot be read"),
        (b"# " + b"x" * 300_000, "more than 65536 bytes"),
    ],
)
@pytest.mark.parametrize("variable", ["VLLM_FL_CONFIG", "VLLM_FL_OP_CONFIG"])
def test_file_that_is_no_text(tmp_path: Path, variable: str, data: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    key = variable.removeprefix("VLLM_FL_").lower()
    with pytest.raises(SettingsError, match=said) as caught:
        load_settings({variable: str(path)})
    assert caught.value.key == key


def test_file_that_may_not_be_read(write: Write) -> None:
    if os.geteuid() == 0:
        path = "/proc/self/mem"  # root may read every other file
    else:
        path = write("c.yaml", "")
        os.chmod(path, 0)
    with pytest.raises(SettingsError, match="cannot be read"):
        policy_from_config(path)


def test_aliases_are_read_but_never_expanded(write: Write) -> None:
    shared = write("c.yaml", "op_backends:\n  m: &o [vendor, flagos]\n  n: *o\n")
    orders = policy_from_config(shared).per_op_order
    assert orders["m"] == orders["n"] == OpOrder.of(["vendor", "flagos"])

    levels = "".join(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))
    for head in ("prefer: !!str\n", "strict: !!bool\n", "deny_vendors:\n", "op_backends:\n"):
        path = write("bomb.yaml", f"{head}- &a0 [x]\n{levels}")
        with pytest.raises(SettingsError):
            policy_from_config(path)
    itself = write("c.yaml", "op_backends:\n  m: &a [*a]\n")
    with pytest.raises(SettingsError, match="recursive"):
        policy_from_config(itself)


@pytest.mark.parametrize("text", ["", "# only this\n", "---\n", "\ufeff{}", "op_backends: {}"])
def test_file_that_sets_nothing(write: Write, text: str) -> None:
    assert policy_from_config(write("c.yaml", text)) == load_settings({}).policy
    none = policy_from_config(write("c.yaml", "allow_vendors: []"))
    assert none.allow_vendors == frozenset()


@pytest.mark.parametrize(
    ("text", "key", "line", "said"),
    [
        ("[]", "op_config", 1, "expected a mapping of settings"),
        ('{"a": "flagos",\n"a": "vendor"}', "op_config", 2, "is set twice"),
        ('{"a": "flagos"\n"b": "vendor"}', "op_config", 2, "invalid YAML or JSON"),
        ("[" * 1200, "op_config", 1, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "op_config", 1, ""),
        ('{"a": 1}', "op_backends.a", 1, "expected a selector"),
        ('{"a": "vendor:\\ud800"}', "op_backends.a", 1, "is not a valid selector"),
    ],
)
def test_op_config_refuses(write: Write, text: str, key: str, line: int, said: str) -> None:
    path = write("o.json", text)
    origin = f"{path}:{line} (environment VLLM_FL_OP_CONFIG)"
    assert said in refused({"VLLM_FL_OP_CONFIG": path}, key=key, origin=origin)


@pytest.mark.parametrize("variable", ["VLLM_FL_CONFIG", "VLLM_FL_OP_CONFIG"])
def test_orders_by_size_are_read_alike_from_both_kinds_of_files(
    write: Write, variable: str
) -> None:
    orders = {
        "a": {"<=16": "vendor:cuda", "<=256": ["flagos", "vendor"], "rest": ["flagos"]},
        "b": {"eager": {"<=1": "reference", "rest": "stock"}, "compiled": "flagos"},
    }
    data = {"op_backends": orders} if variable == "VLLM_FL_CONFIG" else orders
    policy = load_settings(
        {variable: write("o", json.dumps(data)), "VLLM_FL_PREFER": "flagos"}
    ).policy
    assert {op: str(order) for op, order in policy.per_op_order.items()} == {
        "a": "<=16 vendor:cuda, <=256 flagos|vendor, rest flagos",
        "b": "eager <=1 reference, rest stock, compiled flagos",
    }
    assert all(policy.names(op) for op in orders)


@pytest.mark.parametrize("under", ["", "eager: "])
def test_a_plugins_file_may_not_order_by_size(write: Write, under: str) -> None:
    rows = "{<=8: flagos,\n rest: vendor}"
    text = "op_backends:\n  m: " + (f"{{{under}{rows}}}" if under else rows)
    path = write("p.yaml", text)
    said = refused({}, ("acme 1.0", path), key="op_backends.m", origin=f"{path}:2 (acme 1.0)")
    assert "must not have orders by size" in said
    # No error if it is overridden.
    config = write("c.yaml", "op_backends: {m: {<=8: flagos, rest: vendor}}")
    env = {"VLLM_FL_CONFIG": config}
    assert load_settings(env, platform_files=[("acme 1.0", path)]).policy.ceilings("m") == (8,)


# Names.


def test_each_owner_checks_its_names(write: Write) -> None:
    env = {
        "VLLM_FL_PER_OP": "rms_norm=vendor:cuda|vendor:acme;rms_nrom=flagos;mul=flagos",
        "VLLM_FL_DENY_VENDORS": "ascned",
        "VLLM_FL_OOT_BLACKLIST": "RMSNorm",
        "VLLM_FL_FLAGOS_BLACKLIST": "mm,silu_and_mlu,rms_norm",
    }
    settings = load_settings(env)
    assert set(settings.unchecked) == {
        *(f"op_backends.{op}" for op in ("rms_norm", "rms_nrom", "mul")),
        *(f"op_backends.rms_norm.vendor:{vendor}" for vendor in ("cuda", "acme")),
        *(f"flagos_blacklist.{op}" for op in ("mm", "silu_and_mlu", "rms_norm")),
        "deny_vendors.ascned",
        "oot_blacklist.RMSNorm",
    }
    scripted = check_names(settings, op=OPS, vendor={"cuda", "ascend"})
    known = {"op_backends.rms_norm", "op_backends.rms_norm.vendor:cuda"}
    assert set(scripted.unchecked) == set(settings.unchecked) - known
    near = [warning.rpartition("mean ")[2] for warning in scripted.warnings]
    assert near == ["'ascend'?", "'silu_and_mul'?", "'rms_norm'?"]
    assert check_names(scripted, op=OPS, vendor={"cuda", "ascend"}) == scripted

    engine = check_names(scripted, op=OPS, layer={"RMSNorm", "rms_norm"})
    assert set(scripted.unchecked) - set(engine.unchecked) == {"oot_blacklist.RMSNorm"}
    assert engine.policy == settings.policy


# Settings of plugins that are not installed.


def test_an_order_for_an_op_of_vllm_plugin_fl_says_what_has_its_place() -> None:
    settings = load_settings({"VLLM_FL_PER_OP": "topk_softmax=vendor;rms_norm=vendor"})
    bindings = {"acme_topk": Binding(formerly=("topk_softmax",))}  # of any plugin
    (warning,) = check_names(settings, op=OPS, bindings=bindings).warnings
    assert warning.startswith("environment VLLM_FL_PER_OP: op_backends.topk_softmax: ")
    assert "'acme_topk'" in warning and "has no effect" in warning
    brought = (*OPS, "topk_softmax")
    assert check_names(settings, op=brought, bindings=bindings).warnings == ()


def test_an_absent_plugins_settings_are_kept_shown_and_unchecked(write: Write) -> None:
    env = {"USE_FLAGGEMS": "maybe", "VLLM_FL_FLAGOS_BLACKLIST_APPEND": "a b"}
    a = write("a.yaml", "flagos_whitelist: [rms_nrom, mm]\nflagos_mode: fast\n")
    b = write("b.yaml", "flagos_whitelist: [add]\nvendor_acme_streams: true\n")
    settings = loading.load_settings(env, platform_files=[("a 1", a), ("b 2", b)])
    keys = {"flagos_whitelist", "flagos_mode", "vendor_acme_streams"}
    assert {*settings.unowned} == keys | env.keys()
    assert set(settings.unowned) <= set(settings.unchecked)
    assert settings["flagos_whitelist"].value == ("rms_nrom", "mm", "add")
    assert settings["vendor_acme_streams"].value is True
    assert settings["USE_FLAGGEMS"].named == "USE_FLAGGEMS=maybe"
    assert settings.warnings == check_names(settings, op=OPS, vendor=()).warnings == ()
    assert pickle.loads(pickle.dumps(settings)) == settings
    mine = loading.load_settings({"VLLM_FL_CONFIG": a})
    assert set(mine.chosen) == {"config", "platform_files", "flagos_whitelist", "flagos_mode"}
    assert mine.policy == policy_from_config(a)
    for text in ("flagos_whitelist: {a: b}", "flags_blacklist: [a]"):  # no plugin's setting
        with pytest.raises(SettingsError, match="unknown key"):
            loading.load_settings({"VLLM_FL_CONFIG": write("c.yaml", text)})
    # Names that begin like an installed plugin's are checked.
    (warning,) = load_settings({"VLLM_FL_FLAGOS_MODE": "fast"}).warnings
    assert warning.startswith("VLLM_FL_FLAGOS_MODE")
    with pytest.raises(SettingsError, match="unknown key 'flagos_mode'"):
        load_settings({"VLLM_FL_CONFIG": write("c.yaml", "flagos_mode: fast")})


# Pickling.


def test_a_list_that_another_has_cleared_is_not_chosen_in_any_process() -> None:
    settings = load_settings({"VLLM_FL_FLAGOS_WHITELIST": "c"})
    for each in (settings, pickle.loads(pickle.dumps(settings))):
        assert [*each.chosen] == ["flagos_whitelist"]


def test_merged_settings_travel(write: Write) -> None:
    n = "{eager: [flagos, vendor:acme], compiled: stock}"
    a = write("a.yaml", f"strict: true\nop_backends: {{m: [stock, flagos], n: {n}}}\n")
    b = write("b.yaml", "strict: false\nop_backends: {m: [flagos, stock, vendor]}\n")
    files = [("a 1", a), ("b 2", b)]
    ids = {"a 1": "vendor.a", "b 2": "vendor.b", "c 3": "default.flagos"}
    impls = {"m": [(name, silu(impl_id)) for name, impl_id in ids.items()]}
    settings = load_settings({"VLLM_FL_PERFER": "x"}, platform_files=files, brought=impls)
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings and again.policy == settings.policy
    assert again.warnings and again.unchecked
    assert str(again.policy.per_op_order["m"]) == "flagos|stock|impl:vendor.b"
    # It is still the platform's order: `prefer` of a policy context re-sorts it.
    moved = again.policy.preferring("vendor").per_op_order["n"]
    assert str(moved.eager[0][1][0]) == "vendor:acme"


# For any input: settings, or one SettingsError with key and origin.

FILE_KEYS = file_keys(DECLARED)
SOME = ["flagos", "vendor:cuda", "eager", "compiled", "stock", "true", "rms_norm"]
words = st.sampled_from([*FILE_KEYS, *SOME, "a b"])
scalars = st.one_of(words, st.text(max_size=8), st.booleans(), st.none(), st.integers())
objects = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(words, st.text(max_size=4)), inner)
    ),
    max_leaves=12,
)
likely = st.fixed_dictionaries(
    {}, optional={key: st.one_of(objects, st.dictionaries(words, objects)) for key in FILE_KEYS}
)
yaml_texts = st.one_of(
    st.text(),
    st.text(alphabet="&*!|>{}[]:,-?#%@ \n\tab1'\"<~"),
    st.one_of(objects, likely).map(lambda value: yaml.safe_dump(value, allow_unicode=True)),
    objects.map(json.dumps),
)


def settings_or_one_error(
    env: dict[str, str], files: list[tuple[str, str]] | None = None
) -> Settings | None:
    try:
        settings = load_settings(env, platform_files=files or [])
    except SettingsError as error:
        assert error.key and error.origin and str(error).startswith(f"{error.origin}: ")
        return None
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert check_names(settings, op=OPS).policy is not None
    return settings


@given(st.one_of(yaml_texts.map(str.encode), st.binary()))
@example(b"op_backends: {m: {eager: flagos, compiled: [stock]}}")
@example(
    b"op_backends: {m: {eager: {<=8: stock, rest: flagos}, compiled: {<=9: [stock], rest: a}}}"
)
@example(b"op_backends: {m: {<=8: {<=9: stock}, rest: flagos}}")
@example(b"? {}\n: x")
@example(b"!!timestamp 2020-13-45")
@example(b"prefer: !!int x")
@example(b'{"a": NaN}')
def test_any_file(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        settings_or_one_error({"VLLM_FL_CONFIG": file.name})
        settings_or_one_error({"VLLM_FL_OP_CONFIG": file.name})
        settings_or_one_error({}, [("acme 1.0", file.name)])


@given(
    st.dictionaries(
        st.one_of(st.sampled_from(VARIABLES), st.text(max_size=6).map("VLLM_FL_{}".format)),
        st.one_of(
            st.text(alphabet=st.characters(), max_size=20),
            st.lists(words).map(",".join),
            st.lists(st.tuples(words, words).map("=".join)).map(";".join),
            st.sampled_from(["0", "1", "off", "vendor", "INFO", "verify"]),
        ),
        max_size=6,
    )
)
def test_any_environment(env: dict[str, str]) -> None:
    settings = settings_or_one_error(env)
    if settings is None:
        return
    for name, text in env.items():  # a variable without effect causes a warning
        if text.strip() and name not in VARIABLES:
            assert any(name in warning for warning in settings.warnings)
