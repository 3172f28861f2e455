"""The wheel: the same bytes each time, with compiled parts, so no compiler is needed to use it."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from bayplan.data import files
from bayplan.data.plan import Plan
from bayplan.data.record import RunRecord

ROOT = Path(__file__).parents[1]
PARTS = {"replay", "packed", "pulse", "shared_memory", "malloc_counter"}
TRAIN = """\
import torch
from torch import nn


def build(batch_size=2048):
    torch.manual_seed(5)
    layers = [part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())]
    batch = torch.randn(batch_size, 64), torch.randn(batch_size, 1)
    return nn.Sequential(*layers, nn.Linear(64, 1)), batch, nn.functional.mse_loss
"""
FIT = """\
import bayplan
import torch
import train

model, (inputs, targets), loss_fn = train.build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = bayplan.fit(
    model, (inputs, targets), loss_fn, memory="70%", optimizer=optimizer, time_limit_seconds=1
)
with bayplan.record() as recording:
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
print(bayplan.__file__, recording.result.method)
"""


def build(folder: Path, *arguments: str, path: str | None = None) -> Path:
    """Build one archive into a folder, with hatchling as it is installed here."""
    environment = os.environ if path is None else {**os.environ, "PATH": path}
    command = (sys.executable, "-m", *arguments)
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    (built,) = folder.iterdir()
    return built


def wheel_of(source: Path, folder: Path) -> Path:
    """As `pip wheel` makes it."""
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder))
    return build(folder, "pip", "wheel", *options, str(source))


def libraries_in(wheel: Path) -> dict[str, bytes]:
    """Compiled files by the first part of their names."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        return {Path(name).name.split("-")[0]: archive.read(name) for name in names}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_wheel_has_compiled_parts_for_every_python(wheel: Path) -> None:
    libraries = libraries_in(wheel)
    assert libraries.keys() == PARTS
    assert "-py3-none-manylinux_2_" in wheel.name
    assert not [name for name, content in libraries.items() if str(ROOT).encode() in content]


@pytest.mark.slow
def test_same_bytes_wherever_the_source_lies(wheel: Path, tmp_path: Path) -> None:
    """Once from the checkout, once from its source archive, which pip unpacks elsewhere."""
    folder = tmp_path / "source"
    archive = build(folder, "hatchling", "build", "-t", "sdist", "-d", str(folder))
    again = wheel_of(archive, tmp_path / "again")
    assert (again.name, again.read_bytes()) == (wheel.name, wheel.read_bytes())


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_a_pure_one(tmp_path: Path) -> None:
    folder = tmp_path / "pure"
    built = build(folder, "hatchling", "build", "-t", "wheel", "-d", str(folder), path="")
    assert built.name.endswith("-py3-none-any.whl")
    assert libraries_in(built) == {}


def test_editable_install_compiles_on_first_use(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build_data = {"pure_python": True, "force_include": {}}
    hook = module.CompiledParts(str(ROOT), {}, None, None, str(tmp_path), "wheel")
    hook.initialize("editable", build_data)
    assert build_data == {"pure_python": True, "force_include": {}}


@pytest.fixture(scope="module")
def folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment of its own, which has the wheel, and torch from this one."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "train.py").write_text(TRAIN)
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    Path(packages, "torch_of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps")
    subprocess.run([*pip, "--no-index", str(wheel)], check=True, capture_output=True)
    return folder


def call(folder: Path, program: str, *arguments: str) -> str:
    """Start a program of the environment with no other on PATH; return what it printed."""
    environment = {**os.environ, "PATH": "", "BAYPLAN_CACHE": str(folder / "cache")}
    command = [str(folder / "environment" / "bin" / program), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "compiler" not in done.stderr
    assert "parts of bayplan in C are missing" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_installed_wheel_checks_plans_fits_and_runs_without_a_compiler(folder: Path) -> None:
    checked = call(folder, "bayplan", "check", "train:build", "--memory", "100MiB")
    assert checked.startswith("fits: plain peak ")
    assert "scratch memory of kernels" not in checked
    call(
        *(folder, "bayplan", "plan", "train:build", "--memory", "70%"),
        *("--time-limit", "1", "-o", "half.plan.json"),
    )
    call(
        *(folder, "bayplan", "run", "half.plan.json", "--target", "train:build"),
        *("--steps", "2", "-o", "run.json"),
    )
    record = files.read(folder / "run.json", RunRecord)
    limit_bytes = files.read(folder / "half.plan.json", Plan).limit_bytes
    assert limit_bytes is not None
    assert (record.method, record.peak_bytes <= limit_bytes) == ("malloc", True)

    (folder / "fit.py").write_text(FIT)
    where, method = call(folder, "python", "fit.py").split()
    assert where.startswith(str(folder / "environment"))
    assert method == "malloc"
    assert list(folder.glob("cache/*.so")) == [], "nothing was compiled"
