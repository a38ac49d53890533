"""The shell scripts: they parse, explain themselves, set what every run needs, and fail clearly."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
COMMANDS = sorted(LAUNCH.glob("*.sh")) + [LAUNCH / "slurm.sbatch"]
RUNNABLE = [path for path in COMMANDS if path.name != "common.sh"]
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def run(*command, env=None, cwd="/"):
    variables = {k: v for k, v in os.environ.items() if k not in (VARIABLE, "OMP_NUM_THREADS")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**variables, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def checkout(tmp_path):
    """A copy of launch/ whose environment is a stub: its python prints arguments and variables."""
    root = tmp_path / "a checkout"
    shutil.copytree(LAUNCH, root / "launch")
    shutil.copy(ROOT / "setup.py", root)
    (root / "csrc/cpu").mkdir(parents=True)
    (root / "csrc/cpu/cast.cpp").write_text("// one\n")
    (root / "dist_finegrain").mkdir()
    stub = root / ".venv/bin/python"
    stub.parent.mkdir(parents=True)
    stub.write_text(
        '#!/bin/sh\necho "args $*"\necho "threads $OMP_NUM_THREADS"\n'
        f'echo "store ${VARIABLE}"\necho "execution $DIST_FINEGRAIN_EXECUTION"\n'
    )
    stub.chmod(0o755)
    return root


@pytest.mark.parametrize("script", [*COMMANDS, ROOT / ".ci/run"], ids=lambda path: path.name)
def test_parses_and_is_executable(script):
    assert run("bash", "-n", script).stderr == ""
    if script.suffix != ".sbatch" and script.name != "common.sh":
        assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", RUNNABLE, ids=lambda path: path.name)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_usage(script, flag):
    result = run("bash", script, flag)
    assert result.returncode == 0, result.stderr
    usage = f"usage: {'sbatch ' if script.suffix == '.sbatch' else ''}launch/{script.name}"
    assert usage in result.stdout
    assert "source" not in result.stdout  # the comment only, not the script


def test_every_script_sets_the_store_variable():
    common = (LAUNCH / "common.sh").read_text()
    assert f"export {VARIABLE}=1" in common
    for script in RUNNABLE:
        assert "/common.sh" in script.read_text(), script


def test_torchrun_sets_what_ranks_need(checkout):
    result = run("bash", checkout / "launch/torchrun.sh", 2, "train.py", "--steps", 3)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert (
        "args -m torch.distributed.run --standalone --nproc-per-node=2 train.py --steps 3" in lines
    )
    assert f"threads {max(1, os.cpu_count() // 2)}" in lines
    assert "store 1" in lines


@pytest.mark.parametrize(
    "capability, given, expected",
    [
        ("10.0", None, "native"),
        ("9.0", None, "emulate"),
        ("12.0", None, "emulate"),
        (None, None, "emulate"),
        (None, "reference", "reference"),
    ],
)
def test_execution_is_native_on_blackwell_only(checkout, tmp_path, capability, given, expected):
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\necho {capability}\n" if capability else "#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    env = {"PATH": f"{smi.parent}:{os.environ['PATH']}"}
    env["DIST_FINEGRAIN_EXECUTION"] = given or ""
    result = run("bash", checkout / "launch/torchrun.sh", 1, "train.py", env=env)
    assert f"DIST_FINEGRAIN_EXECUTION={expected}" in result.stdout
    assert f"execution {'' if expected == 'native' else expected}" in result.stdout.splitlines()


@pytest.mark.parametrize("arguments", [(), (2,), ("two", "train.py"), (0, "train.py")])
def test_torchrun_refuses_other_arguments(checkout, arguments):
    result = run("bash", checkout / "launch/torchrun.sh", *arguments)
    assert result.returncode == 1
    assert "accepted: RANKS SCRIPT" in result.stderr


def test_torchrun_without_environment_says_what_to_run(checkout):
    shutil.rmtree(checkout / ".venv")
    result = run("bash", checkout / "launch/torchrun.sh", 1, "train.py")
    assert result.returncode == 1
    assert "run launch/setup_env.sh first" in result.stderr


def test_setup_refuses_an_unknown_option_and_an_old_python(checkout, tmp_path):
    result = run("bash", checkout / "launch/setup_env.sh", "--fast")
    assert result.returncode == 1
    assert "unknown option --fast; accepted: --python PATH" in result.stderr
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = run("bash", checkout / "launch/setup_env.sh", "--python", old)
    assert result.returncode == 1
    assert "is not a Python 3.11 or newer" in result.stderr


def test_setup_names_a_missing_venv_module(checkout, tmp_path):
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$2" in *venv*) exit 1 ;; esac\n')
    python.chmod(0o755)
    result = run("bash", checkout / "launch/setup_env.sh", "--python", python)
    assert result.returncode == 1
    assert "has no venv module" in result.stderr


def fake_python(tmp_path):
    """Stands for an interpreter: "venv" makes the stub's folder, which records what it is asked."""
    python = tmp_path / "python3"
    python.write_text(
        '#!/bin/sh\nif [ "$2" = venv ]; then echo venv >>"$CALLS"; for last; do :; done\n'
        'mkdir -p "$last/bin"; printf \'#!/bin/sh\\necho "$*" >>"$CALLS"\\necho "$PATH" '
        '>>"$CALLS.path"\\n\' >"$last/bin/python"; chmod +x "$last/bin/python"; fi\n'
    )
    python.chmod(0o755)
    return python


@pytest.fixture
def calls_of(checkout, tmp_path):
    """Runs setup_env.sh with a stub interpreter; returns the lines of what that was asked to do."""
    python, calls = fake_python(tmp_path), tmp_path / "calls"

    def calls_of(*arguments, names_python=True, **variables):
        calls.write_text("")
        named = ("--python", python) if names_python else ()
        env = {"CALLS": str(calls), **variables}
        result = run("bash", checkout / "launch/setup_env.sh", *named, *arguments, env=env)
        assert result.returncode == 0, result.stderr
        return calls.read_text().splitlines()

    return calls_of


def test_setup_with_nothing_changed_does_nothing(checkout, calls_of):
    """The stamp is compared before anything is made; a changed requirement makes it differ."""
    venv, needs, package, shows_build = first = calls_of()
    assert venv == "venv" and "build_info" in shows_build
    assert "--constraint" in needs and needs.endswith("setuptools wheel ninja pybind11 torch")
    assert f"--no-build-isolation --editable {checkout}[test,plot]" in package
    assert "--constraint" in package
    assert calls_of() == []
    assert calls_of(names_python=False) == []  # the options of the last run hold
    with (checkout / "launch/constraints.txt").open("a") as file:
        file.write("pytest<100\n")
    assert calls_of() == first


def test_setup_uses_the_torch_that_is_installed(calls_of):
    _, needs, package, _ = calls_of("--system-torch")
    assert "--constraint" not in needs + package
    assert needs.endswith("setuptools wheel ninja pybind11")


def test_setup_compiles_again_what_changed(checkout, calls_of, tmp_path):
    """A changed source, build variable or record rebuilds the extension, not the environment."""
    calls_of()

    def recompiles(**variables):
        package, _ = calls_of(**variables)
        return package.endswith(f"--no-build-isolation --no-deps --editable {checkout}")

    (checkout / "csrc/cpu/cast.cpp").write_text("// two\n")
    assert recompiles() and calls_of() == []
    (checkout / "csrc/cpu/more.cpp").write_text("")
    assert recompiles() and calls_of() == []
    assert recompiles(DIST_FINEGRAIN_SKIP_CUDA="1")
    assert calls_of(DIST_FINEGRAIN_SKIP_CUDA="1") == []
    assert recompiles() and calls_of() == []
    (checkout / "dist_finegrain/_build.json").write_text("of another environment")
    assert recompiles() and calls_of() == []
    # torch asks for ninja by name: the environment's own must be found.
    paths = (tmp_path / "calls.path").read_text().splitlines()
    assert paths[0].split(":")[0] == str(checkout / ".venv/bin")


def test_constraint_admits_only_what_setup_requires():
    """setup.py's lower bound must not exceed the pin, or the environment cannot be made."""
    pin = (LAUNCH / "constraints.txt").read_text().split("torch==")[1].split()[0]
    bound = (ROOT / "setup.py").read_text().split('"torch>=')[1].split('"')[0]
    assert [int(n) for n in bound.split(".")] <= [int(n) for n in pin.split(".")]
