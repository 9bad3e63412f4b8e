"""Loading plugins with isolated failures: temporary modules represent distributions."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from builders import started

from vllm_fl.dispatch.manager import OpManager
from vllm_fl.errors import DuplicateError, PluginError, SettingsError, VllmFLError
from vllm_fl.plugins.calling import (
    plugin_findings,
    plugin_rejections,
    policy_files,
    start_in_worker,
)
from vllm_fl.plugins.device import DeviceProfile, find_device
from vllm_fl.plugins.discovery import discover, unmatched_plugins
from vllm_fl.plugins.loading import load
from vllm_fl.plugins.plugin import Owner, Plugin
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.plugins.types import AttentionImpl, BackendImplKind, OpImpl
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.policy import OpOrder, SelectionPolicy

HEAD = "from vllm_fl import AttentionImpl, BackendImplKind, OpImpl, PolicyDefaults, hookimpl\n"
SOUND = """
def silu_and_mul(x):
    return x[..., : x.shape[-1] // 2] + 1

@hookimpl
def register_ops():
    return [OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, silu_and_mul, "acme")]
"""
numbers = itertools.count()

Write = Callable[..., Plugin]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """`write(source, name)`: a module on the path, found as the distribution fl-NAME's plugin."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(source: str, name: str = "acme", attribute: str | None = None) -> Plugin:
        module = f"plugin_{name}_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(HEAD + dedent(source))
        made.append(module)
        (found,) = discover([module])[-1:]
        owner = Owner(name, f"fl-{name}", "1.0", f"/site/{name}")

        def target() -> object:
            return getattr(found.load(), attribute) if attribute else found.load()

        return Plugin(owner, f"{module}:{attribute}" if attribute else module, target)

    yield make
    for module in made:
        sys.modules.pop(module, None)


def one(found: Plugin) -> tuple[Plugin, OpRegistry]:
    registry = OpRegistry()
    (plugin,) = load(registry, [found])
    return plugin, registry


def failure(found: Plugin) -> PluginError:
    plugin, registry = one(found)
    assert plugin.status == "failed"
    assert type(plugin.error) is PluginError
    assert dict(registry.snapshot().owners) == {}, "what it had half registered is left"
    return plugin.error


def test_a_failed_import_or_hook_says_the_line_of_the_plugins_own(write: Write) -> None:
    message = str(failure(write("\nimport json\nimport no_such_library\n")))
    (file,) = re.findall(r"No module named 'no_such_library' \(at (\S+):4\)\. ", message)
    assert Path(file).name.startswith("plugin_acme_") and Path(file).is_file()
    deeper = "def supports(x): return json.loads(x)\nimport json\nsupports('{')"
    assert re.search(r"JSONDecodeError: .* \(at \S+\.py:2\)\. No", str(failure(write(deeper))))
    assert re.search(r"SyntaxError: .* \(at \S+\.py:2\)\. No", str(failure(write("def :"))))
    source = "@hookimpl\ndef register_ops():\n    raise OSError('no licence')\n"
    assert re.search(r"OSError: no licence \(at \S+\.py:4\)\. No", str(failure(write(source))))


def test_a_failed_import_says_what_leaves_it_out(write: Write) -> None:
    broken, sound, other = write("1 / 0"), write(SOUND, "sound"), write("1 / 0", "other")

    def message_of(*found: Plugin, only: list[str] | None = None) -> str:
        return str(load(OpRegistry(), found, only=only)[0].error)

    listed = "disable it with VLLM_FL_PLUGINS="
    assert f"{listed}fl-other,fl-sound." in message_of(broken, sound, other)
    assert f"{listed}fl-sound." in message_of(broken, sound, other, only=["fl-acme", "FL_sound"])
    assert f"{listed}''." in message_of(broken)
    named = Plugin(Owner("acme"), broken.target, broken.load)
    assert "or remove it from VLLM_FL_PLUGIN_MODULES." in message_of(named, sound)


@pytest.mark.parametrize("attribute", ["", "register"])
def test_a_module_that_an_entry_point_leads_to_is_one_plugin(write: Write, attribute: str) -> None:
    by_entry = write(SOUND)
    module = by_entry.target
    entry = dataclasses.replace(by_entry, target=f"{module}:{attribute}" if attribute else module)
    named = Plugin(Owner(module), module, by_entry.load)
    registry = OpRegistry()
    (plugin,) = load(registry, [entry, named])
    assert (plugin.status, plugin.owner) == ("ok", entry.owner)
    assert set(registry.snapshot().owners.values()) == {entry.owner}
    # If the settings exclude its distribution, the user has still named the module.
    left_out, loaded = load(OpRegistry(), [entry, named], only=[])
    assert (left_out.status, loaded.status) == ("disabled", "ok")


def test_debug_logs_the_traceback_without_secrets(
    write: Write, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_TOKEN", "hunter2-and-more")
    source = "def inner():\n    raise OSError('hunter2-and-more')\ninner()"
    failure(write(source))
    assert "Traceback" not in caplog.text
    with caplog.at_level("DEBUG", "vllm_fl"):
        failure(write(source))
    assert "Traceback" in caplog.text and "in inner" in caplog.text
    assert "hunter2" not in caplog.text


def test_the_hooks_of_an_object_with_generators(write: Write) -> None:
    found = write(
        """
        from vllm_fl import CommunicatorImpl

        class Plugin:
            @hookimpl
            def register_ops(self):
                yield OpImpl("rms_norm", "vendor.acme", BackendImplKind.VENDOR, norm, "acme")

            @hookimpl
            def attention_backend(self):
                yield AttentionImpl("vendor.acme", "acme.Backend", BackendImplKind.VENDOR, "acme")

            @hookimpl
            def communicator(self):
                return [CommunicatorImpl("vendor.acme", "acme.C", BackendImplKind.VENDOR, "acme")]

        def norm(x, residual, weight, epsilon, variance_size=None):
            return x

        plugin = Plugin()
        """,
        attribute="plugin",
    )
    plugin, registry = one(found)
    assert plugin.error is None
    assert [*plugin.hooks] == ["attention_backend", "communicator", "register_ops"]
    (attention,) = registry.snapshot().impls_by_op["attention_backend"]
    assert isinstance(attention, AttentionImpl)
    found = set(registry.snapshot().impls_by_op)
    assert found == {"attention_backend", "communicator", "rms_norm"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1", "implements no hook"),
        ("@hookimpl\ndef register_ops():\n    return {'silu_and_mul': 1}", "returned dict"),
        ("@hookimpl\ndef register_ops():\n    return 7", "returned int"),
        ("@hookimpl\ndef register_ops():\n    return ['silu']", "expected OpImpl"),
        ("@hookimpl\ndef register_ops(device):\n    return []", "device"),
        ("@hookimpl\ndef register_opps():\n    return []", "register_opps"),
        (
            "@hookimpl\ndef register_ops():\n"
            "    yield OpImpl('silu_and_mul', 'vendor.x', BackendImplKind.VENDOR, print, 'acme')",
            "'vendor.acme'",
        ),
    ],
)
def test_a_broken_one_costs_itself_only(write: Write, source: str, words: str) -> None:
    broken, sound = write(source, "broken"), write(SOUND, "sound")
    registry = OpRegistry()
    first, second = load(registry, [broken, sound])
    assert (first.status, second.status) == ("failed", "ok")
    assert first.error is not None
    assert words in str(first.error)
    assert (first.error.plugin, first.error.distribution) == ("broken", "fl-broken 1.0")
    assert set(registry.snapshot().owners) == {("silu_and_mul", "vendor.acme")}


def test_an_interrupt_is_not_the_plugins(write: Write) -> None:
    with pytest.raises(KeyboardInterrupt):
        load(OpRegistry(), [write("raise KeyboardInterrupt")])


def test_half_registered_is_rolled_back(write: Write) -> None:
    hooks = SOUND + "\n    yield from ()\n    raise OSError('no table')\n"
    hooks = hooks.replace("return [OpImpl", "yield from [OpImpl")
    assert "no table" in str(failure(write(hooks)))
    older = "def register_builtins(registry):\n    registry.register_many(register_ops())\n"
    older = SOUND.replace("@hookimpl", f"{older}    raise OSError('no table')\n")
    assert "no table" in str(failure(write(older)))


@pytest.mark.parametrize(
    ("api", "words"), [("99", "older release"), ("0", "newer release"), ("'1'", "integer")]
)
def test_another_hook_api_is_named(write: Write, api: str, words: str) -> None:
    error = failure(write(f"HOOK_API = {api}\n" + SOUND))
    assert api in str(error)
    assert "HOOK_API" in str(error) and words in str(error)


class TestOlderForm:
    SOURCE = """
    class Backend:
        available = True

        def is_available(self):
            return self.available

        def silu_and_mul(self, x):
            return x[..., : x.shape[-1] // 2] + 1

        def gelu_and_mul(self, obj, x):
            return obj.approximate

    def rms_norm(self, x, residual=None):
        return x * self.weight

    backend = Backend()

    def {name}(registry):
        registry.register_many([
            OpImpl(op_name="silu_and_mul", impl_id="vendor.acme", kind=BackendImplKind.VENDOR,
                   fn=backend.silu_and_mul, vendor="acme", priority=100),
            OpImpl("gelu_and_mul", "vendor.acme", BackendImplKind.VENDOR,
                   backend.gelu_and_mul, "acme"),
        ])
        registry.register_impl(
            OpImpl("rms_norm", "vendor.acme", BackendImplKind.VENDOR, rms_norm, "acme"))
    """

    @pytest.mark.parametrize("name", ["register_builtins", "vllm_fl_register", "register"])
    def test_all_three_kinds_of_function_work(self, write: Write, name: str) -> None:
        source = self.SOURCE.replace("{name}", name)
        plugin, registry = one(write(source, attribute=name if name == "register" else None))
        assert plugin.error is None
        assert [*plugin.hooks] == ["register_builtins"]
        manager = OpManager(registry)

        class Layer:
            weight = torch.full((4,), 3.0)
            approximate = "tanh"
            variance_epsilon = 1e-6

        assert manager.call("silu_and_mul", torch.ones(1, 2))[0, 0] == 2
        assert manager.call_as_method("silu_and_mul", Layer(), torch.ones(1, 2))[0, 0] == 2
        assert manager.call_as_method("gelu_and_mul", Layer(), torch.ones(1, 2)) == "tanh"
        assert manager.call_as_method("rms_norm", Layer(), torch.ones(1, 4))[0, 0] == 3

    @pytest.mark.parametrize("op", ["silu_and_mul", "rms_norm"])
    def test_the_availability_of_the_backend_and_of_a_function_counts(
        self, write: Write, op: str
    ) -> None:
        source = self.SOURCE.replace("{name}", "register")
        source = source.replace("available = True", f"available = {op == 'rms_norm'}")
        source += "\n    rms_norm._is_available = lambda: False\n"
        _, registry = one(write(source))
        impl = registry.get_implementation(op, "vendor.acme")
        assert impl is not None and not impl.is_available()

    def test_what_cannot_take_the_registry_is_no_silent_nothing(self, write: Write) -> None:
        assert "TypeError" in str(failure(write("def plugin(): return []", attribute="plugin")))
        found = write("class Plugin:\n    def register(self, registry): ...", attribute="Plugin")
        assert "implements no hook" in str(failure(found))


def test_two_with_one_id_both_fail_and_asking_for_it_names_both(write: Write) -> None:
    registry = OpRegistry()
    plugins = load(registry, [write(SOUND, name) for name in ("aaa", "bbb")])
    for plugin in plugins:
        assert plugin.status == "failed" and isinstance(plugin.error, DuplicateError)
        assert (plugin.error.op, plugin.error.impl) == ("silu_and_mul", "vendor.acme")
    for fact in ("fl-aaa 1.0", "/site/aaa", "fl-bbb 1.0", "/site/bbb"):
        assert all(fact in str(plugin.error) for plugin in plugins)
    assert not registry.snapshot().owners
    manager = started(registry, plugins)
    for token in ("impl:vendor.acme", "vendor:acme"):
        policy = SelectionPolicy(per_op_order={"silu_and_mul": OpOrder.of(token)})
        with pytest.raises(PluginError, match=r"fl-aaa 1\.0.*fl-bbb 1\.0|fl-bbb.*fl-aaa"):
            manager.trace("silu_and_mul", policy=policy)


RESERVED = """
def silu_and_mul(x):
    return x

@hookimpl
def register_ops():
    return [OpImpl("silu_and_mul", "{id}", BackendImplKind.REFERENCE, silu_and_mul)]
"""


def reserved(write: Write, impl_id: str, distribution: str) -> Plugin:
    found = write(RESERVED.replace("{id}", impl_id), distribution.replace("-", "_"))
    owner = Owner(found.owner.plugin, distribution, "1.0", f"/site/{distribution}")
    return Plugin(owner, found.target, found.load)


@pytest.mark.parametrize(
    ("impl_id", "holder"),
    [
        ("reference.torch", "vllm-fl-reference"),
        ("reference.mine", "vllm-fl-reference"),
        ("Reference.Torch", "vllm-fl-reference"),
        ("default.flagos", "vllm-fl-flaggems"),
    ],
)
def test_a_reserved_id_is_its_holders_whatever_the_alphabet_says(
    write: Write, impl_id: str, holder: str
) -> None:
    registry = OpRegistry()
    squatter = reserved(write, impl_id, "aaa-squatter")
    own = reserved(write, impl_id, holder.replace("-", "_"))
    first, second = load(registry, [squatter, own])
    assert (first.status, second.status) == ("failed", "ok")
    assert holder in str(first.error) and "aaa-squatter 1.0" in str(first.error)
    assert registry.snapshot().owners["silu_and_mul", impl_id] is second.owner
    (alone,) = load(OpRegistry(), [squatter])
    assert alone.status == "failed"


def test_stock_is_nobodys(write: Write) -> None:
    for distribution in ("aaa", "vllm-fl-core", "vllm-fl-reference"):
        (plugin,) = load(OpRegistry(), [reserved(write, "stock.vllm", distribution)])
        assert plugin.status == "failed"
        assert "reserved for vLLM" in str(plugin.error)
    impl = OpImpl("silu_and_mul", "stock.vllm", BackendImplKind.REFERENCE, lambda x: x)
    with pytest.raises(PluginError, match="reserved for vLLM"):
        OpRegistry().register_impl(impl)


EVIL = [
    "SystemExit(0)",
    "BaseException('PanicException')",
    "StopIteration(3)",
    "Mute()",
    "PluginError('forged', plugin='another')",
]
EVIL_HEAD = """
from vllm_fl import DeviceProfile
from vllm_fl.errors import PluginError

class Mute(Exception):
    def __str__(self):
        raise SystemExit(0)
    __repr__ = __str__

def silu_and_mul(x):
    return x

def evil(*args):
    raise {error}
"""
TARGETS = {
    "import": "evil()",
    "register_ops": "@hookimpl\ndef register_ops():\n    evil()",
    "generator": "@hookimpl\ndef register_ops():\n    evil()\n    yield",
    "attention_backend": "@hookimpl\ndef attention_backend():\n    evil()",
    "older form": "def register_builtins(registry):\n    evil()",
    "settings": "@hookimpl\ndef settings():\n    evil()",
    "attribute": "def __getattr__(name):\n    evil()",
    "signature": (
        "class Fn:\n    def __call__(self, x): return x\n"
        "    __signature__ = property(evil)\n"
        "@hookimpl\ndef register_ops():\n"
        "    return [OpImpl('silu_and_mul', 'vendor.x', BackendImplKind.VENDOR, Fn(), 'x')]"
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("error", EVIL)
def test_whatever_it_raises_at_load_costs_itself_only(
    write: Write, error: str, target: str
) -> None:
    broken = write(EVIL_HEAD.replace("{error}", error) + TARGETS[target], "broken")
    registry = OpRegistry()
    first, second = load(registry, [broken, write(SOUND, "sound")])
    assert (first.status, second.status) == ("failed", "ok")
    assert first.error is not None
    assert first.error.plugin == "broken" and "fl-broken 1.0" in str(first.error)
    assert first.error.distribution == "fl-broken 1.0"


EVERY_HOOK = """
from vllm_fl import SettingSpec

@hookimpl
def settings():
    return [
        SettingSpec("acme_mode", "ACME_MODE", False),
        SettingSpec("acme_read", "ACME_READ", None, read=evil),
    ]

@hookimpl
def register_ops():
    return [OpImpl("silu_and_mul", "vendor.x", BackendImplKind.VENDOR, silu_and_mul, "x",
                   available=evil)]
"""
HOOKS = {"policy": "platform", "device": "", "worker_start": "context", "doctor": "settings"}


@pytest.mark.parametrize("error", [*EVIL, "TypeError('no')", "KeyError('x')"])
@pytest.mark.parametrize("deep", [False, True], ids=["in the hook", "in what it returns"])
def test_whatever_its_other_hooks_raise_is_one_error_with_its_name(
    write: Write, error: str, deep: bool
) -> None:
    hooks = {hook: (args, "evil()") for hook, args in HOOKS.items()}
    hooks["rejections"] = ("settings, op, impls", "evil()")
    if deep:
        profile = "DeviceProfile('acme', 'a.P', 'a.W', detect=evil)"
        hooks["device"] = ("", f"return {profile}")
        odd = "type('R', (), {'__str__': evil})()"
        hooks["rejections"] = (hooks["rejections"][0], f"return {{'vendor.x': {odd}}}")
    made = (f"@hookimpl\ndef {hook}({args}):\n    {body}\n" for hook, (args, body) in hooks.items())
    source = EVIL_HEAD.replace("{error}", error) + EVERY_HOOK + "".join(made)
    plugin, registry = one(write(source))
    assert plugin.status == "ok"
    settings = load_settings({"ACME_MODE": "1"}, platform="cpu", plugins=plugin.settings)
    errors = [policy_files([plugin], "cpu")[1][0]]
    for ask in (
        lambda: plugin_rejections(registry.plugins, settings, "silu_and_mul", ()),
        lambda: plugin_findings(plugin, settings),
        *([] if deep else [lambda: find_device([plugin])]),
    ):
        with pytest.raises(PluginError) as caught:
            ask()
        errors.append(caught.value)
    for failure in errors:
        assert "fl-acme 1.0" in str(failure)
        assert (failure.plugin, failure.distribution) == ("acme", "fl-acme 1.0")
    with pytest.raises(VllmFLError) as worker:
        start_in_worker([plugin], None)  # type: ignore[arg-type]
    if "forged" not in error:  # our own errors reach the user unchanged
        assert "fl-acme 1.0" in str(worker.value) and type(worker.value) is PluginError
    # A setting's error is one of that setting and its origin; a probe's is the reason.
    with pytest.raises(SettingsError, match="environment ACME_READ: acme_read: "):
        load_settings({"ACME_READ": "1"}, platform="cpu", plugins=plugin.settings)
    impl = registry.get_implementation("silu_and_mul", "vendor.x")
    assert impl is not None and not impl.is_available()
    assert error.partition("(")[0].rpartition(".")[2] in str(impl.availability())
    assert not deep or find_device([plugin]) is None


SPEC = """
from vllm_fl import SettingSpec

@hookimpl
def settings():
    return [SettingSpec({spec})]
"""


@pytest.mark.parametrize(
    "spec",
    [
        "5, 'ACME', True",
        "'acme', None, True",
        "'acme', 'ACME', 1.5",
        "'acme', 'ACME', ('a',)",  # a list of unknown items
        "'acme', 'ACME', True, names='op'",
        "'acme', 'ACME', 'a', choices=('b', 'c')",
        "'acme', 'ACME', True), SettingSpec('acme', 'ACME_2', False",
        "'acme', 'ACME', True), SettingSpec('acme_2', 'ACME', False",
    ],
)
def test_a_setting_that_makes_no_sense_costs_its_plugin_only(write: Write, spec: str) -> None:
    registry = OpRegistry()
    found = [write(SPEC.format(spec=spec), "broken"), write(SOUND, "sound")]
    first, second = load(registry, found)
    assert (first.status, second.status, first.settings) == ("failed", "ok", ())
    assert "fl-broken 1.0" in str(first.error)
    declared = [spec for plugin in registry.plugins for spec in plugin.settings]
    load_settings({"ACME": "1"}, platform="cpu", plugins=declared)


@pytest.mark.parametrize(
    "spec",
    [
        "'acme', 'ACME', None",
        "'ACME', 'ACME', False",
        "'acme', 'ACME', None, choices=('a', 'b')",
        "'acme', 'ACME', ('a',), names='op'",
        "'acme', 'ACME', None, names='op', excludes='b'), SettingSpec('b', 'B', (), names='op'",
    ],
)
def test_a_setting_that_makes_sense_is_declared(write: Write, spec: str) -> None:
    plugin, _ = one(write(SPEC.format(spec=spec)))
    assert plugin.error is None and plugin.settings[0].variable == "ACME"


@pytest.mark.parametrize("spec", ["None, read=lambda _: 3", "'a', read=list", "True, read=str"])
def test_a_setting_of_another_type_is_one_error(write: Write, spec: str) -> None:
    plugin, _ = one(write(SPEC.format(spec=f"'acme', 'ACME', {spec}")))
    with pytest.raises(SettingsError, match="acme: its `read` of "):
        load_settings({"ACME": "1"}, platform="cpu", plugins=plugin.settings)


def test_a_variable_that_it_sets_is_named(
    write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    monkeypatch.setenv("ACME_OWN", "0")
    one(write("import os\nos.environ |= {'VLLM_FL_PREFER': 'flagos', 'ACME_OWN': '1'}\n" + SOUND))
    assert "of fl-acme 1.0 (/site/acme) set VLLM_FL_PREFER; only the user" in caplog.text


def test_a_foreign_name_forges_no_line(write: Write) -> None:
    found = write("raise OSError('x\\nERROR forged')")
    owner = Owner("\x1b[31mred\nERROR", "fl-acme\nERROR", "1.0")
    (plugin,) = load(OpRegistry(), [Plugin(owner, found.target, found.load)])
    assert str(plugin.error).isprintable()


def test_it_declares_the_distributions_of_the_kernels_that_it_runs(write: Write) -> None:
    plugin, registry = one(write("KERNEL_DISTRIBUTIONS = ('acme-kernels',)\n" + SOUND))
    assert plugin.status == "ok"
    assert plugin.owner.kernels == ("acme-kernels",)
    assert registry.snapshot().owners["silu_and_mul", "vendor.acme"].kernels == ("acme-kernels",)
    wrong = failure(write("KERNEL_DISTRIBUTIONS = 'acme-kernels'\n" + SOUND))
    assert "expected a tuple" in str(wrong)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("numba", "Did you mean 'vllm-fl-numba'?"),
        ("vllm-fl-nunba", "Did you mean 'vllm-fl-numba'?"),
        ("reference", "Did you mean 'vllm-fl-reference'?"),
        ("zzz", "Installed: vllm-fl-numba, vllm-fl-reference."),
    ],
)
def test_an_unknown_name_is_reported_with_a_suggestion(name: str, words: str) -> None:
    owners = [Owner("numba", "vllm-fl-numba"), Owner("torchlike", "vllm_fl_reference")]
    (line,) = unmatched_plugins(owners, [name, "VLLM_FL.numba"])
    assert repr(name) in line and words in line
    assert unmatched_plugins(owners, None) == unmatched_plugins(owners, []) == ()


def test_policy_files_and_errors(write: Write) -> None:
    policy = """
    @hookimpl
    def policy(platform):
        return PolicyDefaults("/acme.yaml") if platform == "acme" else None
    """
    wrong = "@hookimpl\ndef policy(platform):\n    return 'acme.yaml'"
    plugins = load(OpRegistry(), [write(policy, "aaa"), write(wrong, "bbb")])
    files, errors = policy_files(plugins, "acme")
    assert files == [("fl-aaa 1.0", "/acme.yaml")]
    assert [each.plugin for each in errors] == ["bbb"]
    assert "expected PolicyDefaults" in str(errors[0])
    assert policy_files(plugins[:1], "cpu") == ([], [])


DEVICE = """
from vllm_fl import DeviceProfile

@hookimpl
def device():
    return DeviceProfile("{name}", "{name}.P", "{name}.W", detect=lambda: {detected})
"""


def devices(write: Write, **detected: object) -> tuple[Plugin, ...]:
    found = [
        write(DEVICE.format(name=name, detected=repr(verdict)), name)
        for name, verdict in detected.items()
    ]
    return load(OpRegistry(), found)


def test_the_device_that_this_machine_has(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    plugins = devices(write, acme=True, beta="no /dev/beta0")
    profile = find_device(plugins)
    assert profile is not None
    assert (profile.name, profile.worker_class) == ("acme", "acme.W")
    assert find_device(plugins[1:]) is None
    assert find_device(plugins, "gamma") is None
    with pytest.raises(PluginError, match="missing: no /dev/beta0") as raised:
        find_device(plugins, "beta")
    assert raised.value.distribution == "fl-beta 1.0"
    # If another plugin's device is available, the error of a hook is logged.
    broken = write("@hookimpl\ndef device():\n    raise SystemExit('no driver')\n", "broken")
    profile = find_device((*load(OpRegistry(), [broken]), *plugins))
    assert profile is not None and profile.name == "acme"
    assert "its device hook failed: SystemExit: no driver" in caplog.text


def test_two_devices_are_one_error_that_names_both_and_the_user_decides(write: Write) -> None:
    plugins = devices(write, acme=True, beta=True)
    with pytest.raises(PluginError) as raised:
        find_device(plugins)
    assert "'acme' of fl-acme 1.0, 'beta' of fl-beta 1.0" in str(raised.value)
    assert "VLLM_FL_PLATFORM" in str(raised.value)
    beta = find_device(plugins, "beta")
    assert beta is not None and beta.name == "beta"


@pytest.mark.parametrize(
    "fields",
    [{"name": "Acme"}, {"name": "ac-me"}, {"worker_class": "W"}, {"communicator_class": "C"}],
)
def test_a_device_profile_is_checked_when_it_is_made(fields: dict[str, str]) -> None:
    sound = {"name": "acme", "platform_class": "a.P", "worker_class": "a.W"}
    with pytest.raises(ValueError, match=r"lower-case identifier|must be 'module\.Class'"):
        DeviceProfile(**{**sound, **fields}, detect=lambda: True)


LAYERS = """
from vllm_fl import LayerImpl

@hookimpl
def layers():
    yield LayerImpl("RowParallelLinear", "acme.linear.Row", BackendImplKind.VENDOR, "acme")
    yield LayerImpl("LogitsProcessor", "acme.logits.Processor", BackendImplKind.VENDOR, "acme")
"""


def test_the_hook_for_whole_layers(write: Write) -> None:
    plugin, registry = one(write(LAYERS))
    assert (plugin.status, [*plugin.hooks]) == ("ok", ["layers"])
    assert registry.snapshot().layers == ("LogitsProcessor", "RowParallelLinear")
    assert registry.snapshot().owners["RowParallelLinear", "vendor.acme"] is plugin.owner


DOUBLE = """
from vllm_fl import Binding, Contract, LayerTarget, OpSpec, Sample, Tolerance, Variant

def double(x):
    "2 * x."
    return 2 * x.double()

def spec(oracle=double):
    return OpSpec(
        oracle=oracle,
        variants=(Variant("", "(Tensor x) -> Tensor"),),
        fake=lambda x: x.new_empty(x.shape),
        check=lambda x: None,
        samples=lambda dtype, device: [],
        served=lambda sizes, dtype, device, large=False: [],
        by_token=frozenset({"x"}),
        bad_inputs=lambda dtype, device: [],
        tolerances={"float32": Tolerance(1e-6, 1e-6, "one rounding")},
    )

@hookimpl
def contracts():
    return [Contract(spec())]
"""


def test_an_op_that_a_plugin_brings(write: Write) -> None:
    plugin, registry = one(write(DOUBLE + SOUND.replace("silu_and_mul", "double")))
    snapshot = registry.snapshot()
    assert (plugin.status, plugin.error) == ("ok", None)
    assert "double" in snapshot.contracts and snapshot.authors["double"] == plugin.owner
    assert snapshot.bindings["double"].targets == ()
    manager = OpManager(registry, SelectionPolicy())
    assert manager.call("double", torch.ones(4)).eq(2).all()
    registry.remove(plugin.owner)
    after = registry.snapshot()
    assert not {"double"} & {*after.contracts, *after.bindings, *after.authors}


def test_another_plugins_implementation_of_it_is_held_to_its_contract(write: Write) -> None:
    other = SOUND.replace("silu_and_mul", "double").replace("(x)", "(y)")
    registry = OpRegistry()  # the plugin loaded first uses what the later one provides
    early, late = load(registry, [write(other, "aaa"), write(DOUBLE, "zzz")])
    assert late.status == "ok" and early.status == "failed"
    assert "takes (y), but the contract has (x)" in str(early.error)


def test_two_with_one_op_both_fail_and_name_each_other(write: Write) -> None:
    registry = OpRegistry()
    plugins = load(registry, [write(DOUBLE + SOUND, "one"), write(DOUBLE, "two")])
    assert "double" not in registry.snapshot().contracts
    for plugin, other in zip(
        plugins, ("fl-two 1.0 (/site/two)", "fl-one 1.0 (/site/one)"), strict=True
    ):
        message = f"the contract of op 'double' rejected: also provided by {other}"
        assert plugin.status == "failed" and message in str(plugin.error)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("spec()", "expected an iterable of Contract"),
        ("[spec()]", "expected Contract"),
        ("[Contract('double')]", "expected an OpSpec"),
        ("[Contract(spec(lambda x: x))]", "expected lower-case letters"),
        ("[Contract(spec(), binding='no_such.module')]", "No module named 'no_such'"),
        ("[Contract(spec(), binding='json')]", "expected a Binding"),
        ("1 / 0", "ZeroDivisionError"),
        ("(exec('raise SystemExit(3)') or c for c in [1])", "SystemExit: 3"),
    ],
)
def test_a_contract_that_makes_no_sense_costs_its_plugin_only(
    write: Write, returned: str, words: str
) -> None:
    found = write(DOUBLE.replace("[Contract(spec())]", returned) + SOUND)
    registry = OpRegistry()
    broken, sound = load(registry, [found, write(SOUND.replace("acme", "other"), "other")])
    assert (broken.status, sound.status) == ("failed", "ok")
    assert words in str(broken.error) and "fl-acme 1.0" in str(broken.error)
    assert "double" not in registry.snapshot().authors


def test_only_an_op_without_a_place_needs_no_calls_of_a_model(write: Write) -> None:
    calls = "served=lambda sizes, dtype, device, large=False: []"
    source = DOUBLE.replace(calls, "served=unserved")
    unserved = f"from vllm_fl.contracts.spec import unserved{source}"
    plugin, _ = one(write(unserved))
    assert (plugin.status, plugin.error) == ("ok", None)
    placed = 'BINDING = Binding((LayerTarget("acme.Double", double),))'
    bound = unserved.replace("Contract(spec())", "Contract(spec(), __name__)")
    plugin, registry = one(write(f"{bound}\n{placed}\n", "beta"))
    assert "'double' has targets in vLLM, but its contract has no `served`" in str(plugin.error)
    assert "double" not in registry.snapshot().contracts
