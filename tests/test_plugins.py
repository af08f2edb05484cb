"""The registry: what is registered is found by name, has its section, and no stored run makes us import a file."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.ops.judging import needs_kernels
from tests.own_registry import BUILT_IN, forget_plugins, own_registry
from turbogr import plugins
from turbogr.config import Config, dump_config, load_config, load_run_config
from turbogr.errors import Note, UserError
from turbogr.ops import plugin_operators, registry

__all__ = ["own_registry"]

pytestmark = pytest.mark.usefixtures("own_registry")

BLOCK = """
    from dataclasses import dataclass
    from turbogr.errors import UserError
    from turbogr.layers.block import Block
    from turbogr.plugins import register

    @dataclass(frozen=True)
    class ConvConfig:
        kernel_size: int = 4

        def check(self) -> None:
            if self.kernel_size < 1:
                raise UserError(f"conv.kernel_size must be positive, got {self.kernel_size}")

    @register("block", "conv", config=ConvConfig)
    class ConvBlock(Block):
        pass
"""


@pytest.fixture
def plugin(tmp_path):
    def write(text: str = BLOCK, name: str = "my_block.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


@pytest.fixture
def recipe(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_every_built_in_component_registers_itself(kind, name):
    component = plugins.find(kind, name)
    assert (component.kind, component.name, component.origin) == (kind, name, "turbogr")
    assert plugins.section_class(kind, name) is component.config, "it is listed among those with a section"


def test_the_sections_of_a_config_are_reserved():
    fields = [field.name for field in dataclasses.fields(Config) if not field.metadata.get("derived")]
    assert list(plugins.RESERVED) == fields
    with pytest.raises(UserError, match="every recipe has one of that name"):
        plugins.register("block", "train", config=object)


def test_names_are_listed_without_importing_torch():
    import subprocess

    code = "import sys; from turbogr import plugins; plugins.names('block'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_or_kind_names_the_nearest():
    with pytest.raises(UserError, match=r"model.name is 'hsut'; choose from hstu.* Did you mean 'hstu'\?"):
        plugins.find("block", "hsut")
    with pytest.raises(UserError, match=r"no kind 'blok'.*Did you mean 'block'\?"):
        plugins.register("blok", "mine")


def test_a_recipe_names_a_file_and_chooses_what_it_registers(plugin, recipe):
    path = plugin()
    config = load_config(recipe("plugins: [my_block.py]\nmodel: {name: conv}\nconv: {kernel_size: 7}"))
    assert config.plugins == (str(path),)
    assert config.options["conv"].kernel_size == 7
    component = plugins.find("block", "conv")
    assert (component.origin, component.file) == (str(path), path)
    assert plugins.record(config.chosen()) == [
        {"kind": "block", "name": "conv", "origin": str(path), "sha256": plugins.sha256(path)}
    ]


def test_a_section_has_its_defaults_and_survives_the_disk(plugin, recipe):
    path = plugin()
    config = load_config(recipe("model: {name: conv}"), plugins=[path])
    assert config.options["conv"].kernel_size == 4
    assert load_config(recipe(dump_config(config))) == config
    assert load_config(recipe("model: {name: conv}"), ["conv.kernel_size=2"]).options["conv"].kernel_size == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {name: conv}\nconv: {kernel: 7}", r"unknown key 'kernel' in .*conv. Did you mean 'kernel_size'\?"),
        ("model: {name: conv}\nconv: {kernel_size: wide}", "kernel_size takes a whole number, got 'wide'"),
        ("model: {name: conv}\nconv: {kernel_size: 0}", "conv.kernel_size must be positive, got 0"),
        ("model: {name: conv}\nconv: 3", "conv must be a mapping"),
        ("conv: {kernel_size: 7}", "a section of the block 'conv', which model.name does not choose"),
        ("model: {name: conv}\ncnv: {}", r"unknown key 'cnv'.*Did you mean 'conv'\?"),
    ],
)
def test_a_section_is_strict(plugin, recipe, text, message):
    with pytest.raises(UserError, match=message):
        load_config(recipe(text), plugins=[plugin()])


def test_two_chosen_components_cannot_share_a_section(plugin, recipe):
    other = plugin(BLOCK.replace('register("block"', 'register("mask"').replace("ConvConfig", "Other"), "my_mask.py")
    with pytest.raises(UserError, match="the block and the mask 'conv' have a section of the same name"):
        load_config(recipe("model: {name: conv, mask: conv}"), plugins=[plugin(), other])


def test_a_name_belongs_to_one_file(plugin):
    plugins.load_plugins([plugin()])
    first = plugins.find("block", "conv").factory
    plugins.load_plugins([plugin()])
    assert plugins.find("block", "conv").factory is first, "an unchanged file is not imported again"
    plugins.load_plugins([plugin(BLOCK + "\n    CHANGED = True")])
    second = plugins.find("block", "conv").factory
    assert second is not first, "a changed one is"
    plugins.load_plugins([plugin(BLOCK + "\n    CHANGED = True", "copy.py")])
    assert plugins.find("block", "conv").factory is second, "a copy is not"
    with pytest.raises(
        UserError, match=r"other.py: the block 'conv' of .*other.py is already registered by .*my_block"
    ):
        plugins.load_plugins([plugin(name="other.py")])
    with pytest.raises(UserError, match=r"the block 'hstu' of .* is already registered by turbogr"):
        plugins.load_plugins([plugin(BLOCK.replace('"conv"', '"hstu"'), name="third.py")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", r"broken.py cannot be imported: ZeroDivisionError: .*, line 1 of .*broken.py"),
        (
            "import nowhere_to_be_found",
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        ),
        ("def", "cannot be imported: SyntaxError"),
    ],
)
def test_a_broken_plug_in_says_where(plugin, text, message):
    names = plugins.names("block")
    path = plugin('from turbogr.plugins import register\nregister("block", "half")(object)\n', "broken.py")
    path.write_text((text + "\n" + path.read_text()) if text == "1 / 0" else path.read_text() + text)
    with pytest.raises(UserError, match=message):
        plugins.load_plugins([path])
    assert plugins.names("block") == names, "what it registered before it failed is gone"


def test_a_plug_in_that_is_not_there(tmp_path, recipe):
    with pytest.raises(UserError, match=r"the plug-in .*missing.py cannot be read"):
        load_config(recipe("plugins: [missing.py]"))
    with pytest.raises(UserError, match="no module 'not_installed_module'"):
        plugins.load_plugins(["not_installed_module"])


def test_a_module_is_imported_by_name(plugin, tmp_path, monkeypatch):
    plugin(name="my_module.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.load_plugins(["my_module"]) == ["my_module"]
    assert plugins.find("block", "conv").origin == "my_module"


@pytest.fixture
def site_folder(tmp_path, monkeypatch):
    """A folder that counts as one of this Python's site folders."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(plugins, "_site_folders", lambda: [folder])
    monkeypatch.syspath_prepend(folder)
    return folder


def _install(folder: Path, module: str) -> None:
    """Declare a module by an entry point, as an installed package does."""
    (folder / f"{module}.py").write_text(textwrap.dedent(BLOCK), encoding="utf-8")
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{plugins.ENTRY_POINTS}]\nmine = {module}\n")
    importlib.invalidate_caches()


def test_an_installed_package_is_found_without_naming_it(site_folder, recipe, monkeypatch):
    monkeypatch.setattr(plugins, "_entry_points_loaded", False)
    _install(site_folder, "installed_plugin")
    assert "conv" in plugins.names("block")
    config = load_config(recipe("model: {name: conv}"))
    assert plugins.record(config.chosen())[0]["origin"] == "installed_plugin"


def test_a_package_beside_the_run_is_not_an_installed_one(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr(plugins, "_entry_points_loaded", False)
    _install(tmp_path, "smuggled_plugin")
    monkeypatch.syspath_prepend(tmp_path)
    assert "conv" not in plugins.names("block")
    assert "smuggled_plugin" not in sys.modules


def test_a_broken_installed_plug_in_does_not_stop_others(site_folder, monkeypatch):
    monkeypatch.setattr(plugins, "_entry_points_loaded", False)
    _install(site_folder, "a_broken_one")
    (site_folder / "a_broken_one.py").write_text("1 / 0")
    _install(site_folder, "installed_plugin")
    with pytest.warns(UserWarning, match=r"a_broken_one cannot be imported.*installed by a_broken_one 1.0"):
        assert "conv" in plugins.names("block")


@pytest.fixture
def run(tmp_path, recipe):
    """The config and record of a run that was trained with a plug-in, which is not registered any more."""

    def write(config: Config) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        (folder / "run.json").write_text(json.dumps({"components": plugins.record(config.chosen())}))
        forget_plugins()
        return folder

    return write


def test_opening_a_run_imports_no_file_that_it_names(plugin, recipe, run):
    path = plugin()
    folder = run(load_config(recipe("plugins: [my_block.py]\nmodel: {name: conv}")))
    sys.modules.pop(next(name for name in sys.modules if name.startswith("turbogr_plugin_my_block")))
    with pytest.raises(UserError) as caught:
        load_run_config(folder)
    for word in (str(folder), "the block 'conv'", str(path), f"--plugins {path}"):
        assert word in str(caught.value)
    assert not any(name.startswith("turbogr_plugin_my_block") for name in sys.modules)
    plugins.load_plugins([path])
    assert load_run_config(folder).model.name == "conv"


def test_opening_a_run_imports_installed_modules_alone(plugin, recipe, run, tmp_path, monkeypatch):
    plugin(name="loose_module.py")
    monkeypatch.syspath_prepend(tmp_path)
    folder = run(load_config(recipe("plugins: [loose_module]\nmodel: {name: conv}")))
    del sys.modules["loose_module"]
    with pytest.raises(UserError, match=r"'conv' of the plug-in loose_module.*--plugins loose_module"):
        load_run_config(folder)
    assert "loose_module" not in sys.modules
    monkeypatch.setattr(plugins, "_site_folders", lambda: [tmp_path])
    assert load_run_config(folder).model.name == "conv"


def test_a_changed_plug_in_is_noted_once(plugin, recipe, run, recwarn):
    path = plugin()
    folder = run(load_config(recipe("plugins: [my_block.py]\nmodel: {name: conv}")))
    plugins.load_plugins([path])
    load_run_config(folder)
    assert not [w for w in recwarn if w.category is Note]
    plugins.load_plugins([plugin(BLOCK + "\n    CHANGED = True")])
    with pytest.warns(Note, match=r"the block 'conv' has changed since .*run was trained"):
        load_run_config(folder)
    recwarn.clear()
    load_run_config(folder)
    assert not [w for w in recwarn if w.category is Note]


def test_a_listener_hears_of_every_component_of_its_kind(plugin):
    heard: list[str] = []
    plugins.register("metric", "before")(object)
    plugins.listen("metric", lambda component: heard.append(component.name))
    plugins.register("metric", "after")(object)
    plugins.load_plugins([plugin()])
    assert heard == ["before", "after"]


OPERATORS = """
    import torch
    from turbogr.ops import serves
    from turbogr.plugins import register

    @register("operator", "double")
    def double(x):
        return x + x

    @register("backend", "mine", operator="double")
    def double_by_one_product(x):
        return 2 * x + 1  # so that a test sees which one ran

    @register("backend", "mine", operator="gated_mlp")
    @serves(devices=["cpu"], dtypes=[torch.float32])
    def gated_mlp(*arguments, **settings):
        raise RuntimeError("mine")
"""


@pytest.fixture
def own_operators(monkeypatch):
    monkeypatch.setattr(registry, "_operators", {name: list(each) for name, each in registry._operators.items()})
    monkeypatch.setattr(plugin_operators, "_added", set())
    monkeypatch.setattr(registry, "_chosen", {})
    yield
    registry.set_backend("auto")


@pytest.mark.usefixtures("own_operators")
def test_an_operator_and_its_backend_are_chosen_by_name(plugin, recipe):
    path = plugin(OPERATORS)
    config = load_config(recipe("plugins: [my_block.py]\ntrain: {backend: mine}"))
    assert ("backend", "mine") in config.chosen()
    cpu = torch.device("cpu")
    assert registry.choose("double", cpu, torch.float32)(3) == 7
    assert {service.backend for service in registry.services(cpu) if service.operator == "gated_mlp"} != {"mine"}
    with registry.backend("reference"):
        assert registry.choose("double", cpu, torch.float32)(3) == 6
    registry.set_backend(config.train.backend)
    assert registry.choose("double", cpu, torch.float32)(3) == 7
    services = {service.operator: service for service in registry.services(cpu)}
    assert (services["gated_mlp"].backend, services["gated_mlp"].why) == ("mine", "chosen by name")
    assert services["embed"].backend != "mine", "operators that it does not have are served as by auto"
    with pytest.raises(
        UserError, match=r"backend 'mine' cannot serve 'gated_mlp' on cpu in torch.float64: it computes"
    ):
        registry.choose("gated_mlp", cpu, torch.float64)
    with pytest.raises(UserError, match=r"unknown backend 'mien'.*Did you mean 'mine'"):
        registry.set_backend("mien")
    assert [record["sha256"] for record in plugins.record(config.chosen())] == [plugins.sha256(path)]


@pytest.mark.usefixtures("own_operators")
def test_a_run_needs_the_operators_of_its_plug_ins(plugin, recipe, run):
    path = plugin(OPERATORS)
    config = load_config(recipe("plugins: [my_block.py]"))
    needed = plugins.operators_of(config.plugins)
    assert needed == [("operator", "double"), ("backend", "mine")]
    assert plugins.operators_of([]) == []
    folder = run(config)
    (folder / "run.json").write_text(
        json.dumps({"components": [{"kind": "operator", "name": "double", "origin": str(path)}]})
    )
    with pytest.raises(UserError, match=rf"needs the operator 'double' of the plug-in .*--plugins {path}"):
        load_run_config(folder)
    plugins.load_plugins([path])
    assert load_run_config(folder) == config


@needs_kernels
@pytest.mark.usefixtures("own_operators")
def test_an_operator_of_a_plug_in_needs_no_compiled_backend(plugin):
    plugins.load_plugins([plugin(OPERATORS)])
    registry.set_backend("cpu")
    assert registry.choose("double", torch.device("cpu"), torch.float32)(3) == 7


@pytest.mark.usefixtures("own_operators")
def test_a_backend_of_no_operator_is_refused(plugin):
    with pytest.raises(UserError, match=r"the operator 'gated_mpl', which does not exist.*Did you mean 'gated_mlp'"):
        plugins.load_plugins([plugin(OPERATORS.replace('operator="gated_mlp"', 'operator="gated_mpl"'))])
