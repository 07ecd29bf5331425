"""Two distributions: the kernel library needs torch and triton, and nothing of the trainer; the trainer needs it."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OURS = {"fasttrain": ROOT, "fasttrain-kernels": ROOT / "kernels"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Both, unpacked, each by itself."""
    built, sources = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for name in ("fasttrain", "kernels"):  # building in place would leave what a later build takes for sources
        shutil.copytree(
            ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        )
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(built)]
    subprocess.run([*command, str(sources), str(sources / "kernels")], check=True, capture_output=True, text=True)
    unpacked = {}
    for name in OURS:
        (wheel,) = built.glob(f"{name.replace('-', '_')}-*.whl")
        unpacked[name] = tmp_path_factory.mktemp(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked[name])
    return unpacked


def metadata(directory: Path) -> list[str]:
    return next(directory.glob("*.dist-info")).joinpath("METADATA").read_text().splitlines()


def needed(requirements: list[str], found: set[str] | None = None) -> set[str]:
    """All distributions that these bring, without extras."""
    found = set() if found is None else found
    for requirement in map(Requirement, requirements):
        name = requirement.name.lower().replace("_", "-")
        if (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})) or name in found:
            continue
        if name in OURS:
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:  # the CPU build of torch has no CUDA
            continue
        found.add(name)
        needed(installed.requires or [], found)
    return found


def environment(place: Path, names: set[str]) -> Path:
    """A directory with these distributions and no others."""
    place.mkdir()
    for name in names:
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (place / top).exists():
                (place / top).symlink_to(str(installed.locate_file(top)))
    return place


def run(code: str, *paths: Path) -> str:
    """With these directories and the standard library alone."""
    begin = f"import sys; sys.path[:0] = {[*map(str, paths)]}\n"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", begin + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def requires(directory: Path) -> list[str]:
    return [line.partition(": ")[2] for line in metadata(directory) if line.startswith("Requires-Dist: ")]


@pytest.mark.slow
def test_the_library_needs_torch_and_triton_alone(wheels, tmp_path):
    place = wheels["fasttrain-kernels"]
    assert {each.name for each in place.iterdir() if each.suffix != ".dist-info"} == {"fasttrain_kernels"}
    plain = {re.match(r"[\w-]+", text)[0] for text in requires(place) if "extra" not in text}
    assert plain == {"torch", "triton"}
    code = """
import torch, fasttrain_kernels as ft
for name in ft.__all__:
    if name != "use_kernels":
        getattr(ft, name)
x = torch.randn(2, 9, 32, requires_grad=True)
q = ft.rms_norm(x, None).unflatten(-1, (2, 16))
hidden = ft.attention(q, q, q).flatten(2)
ft.linear_cross_entropy(hidden, torch.randn(50, 32), torch.ones(2, 9).long()).backward()
print(bool(x.grad.abs().sum() > 0), *{"rich", "numpy", "ml_dtypes", "transformers", "fasttrain"} & {*sys.modules})
"""
    brought = needed(requires(place))
    assert not {"rich", "ml-dtypes", "transformers", "tyro"} & brought
    assert run(code, place, environment(tmp_path / "with", brought)) == "True\n"
    assert run(code, place, environment(tmp_path / "without", brought - {"triton"})) == "True\n"


@pytest.mark.slow
def test_the_trainer_needs_the_library_in_its_own_version(wheels, tmp_path):
    place = wheels["fasttrain"]
    assert {each.name for each in place.iterdir() if each.suffix != ".dist-info"} == {"fasttrain"}
    (version,) = (line.partition(": ")[2] for line in metadata(place) if line.startswith("Version: "))
    assert f"fasttrain-kernels=={version}" in requires(place)
    assert f"Version: {version}" in metadata(wheels["fasttrain-kernels"])
    both = [place, wheels["fasttrain-kernels"]]
    brought = needed([*requires(place), *requires(both[1])])
    code = (
        "import fasttrain.train, fasttrain.cli, fasttrain.tools.generate\n"
        "print(fasttrain.__version__, *sorted({'wandb', 'transformers', 'ml_dtypes', 'pyarrow'} & {*sys.modules}))"
    )
    assert run(code, *both, environment(tmp_path / "site", brought)) == f"{version}\n"


def test_versions_have_one_source():
    for directory in OURS.values():
        assert "version" in tomllib.loads((directory / "pyproject.toml").read_text())["project"]["dynamic"]
    assert distribution("fasttrain").version == (ROOT / "kernels" / "VERSION").read_text().strip()
    assert (ROOT / "LICENSE").read_text() == (ROOT / "kernels" / "LICENSE").read_text()


def test_importing_the_library_loads_nothing():
    """Names are found when they are used; and then nothing that torch has not loaded, but triton."""
    code = "import sys; before = {*sys.modules}; import fasttrain_kernels; print(len({*sys.modules} - before))"
    assert int(subprocess.check_output([sys.executable, "-c", code], text=True)) < 10
    loaded = (
        "import sys, torch; before = {name.partition('.')[0] for name in sys.modules}\n"
        "import fasttrain_kernels as ft\n"
        "for name in ft.__all__:\n"
        "    if name != 'use_kernels': getattr(ft, name)\n"
        "new = {name.partition('.')[0] for name in sys.modules} - before - {*sys.stdlib_module_names}\n"
        "print(*sorted(name for name in new if not name.startswith(('fasttrain_kernels', 'triton', '_sysconfigdata'))))"
    )
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True).split() == []
