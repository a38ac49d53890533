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


def test_setup_with_nothing_changed_does_nothing(checkout, tmp_path):
    """The stamp is compared before anything is made; a changed requirement makes it differ."""
    python = tmp_path / "python3"
    # Stands for an interpreter: "venv" makes the stub's folder, which records what pip is asked.
    python.write_text(
        '#!/bin/sh\nif [ "$2" = venv ]; then echo venv >>"$CALLS"; for last; do :; done\n'
        'mkdir -p "$last/bin"; printf \'#!/bin/sh\\necho "pip $*" >>"$CALLS"\\n\' '
        '>"$last/bin/python"; chmod +x "$last/bin/python"; fi\n'
    )
    python.chmod(0o755)
    calls = tmp_path / "calls"
    setup = checkout / "launch/setup_env.sh"

    def calls_of(*arguments):
        calls.write_text("")
        result = run("bash", setup, *arguments, env={"CALLS": str(calls)})
        assert result.returncode == 0, result.stderr
        return calls.read_text()

    first = calls_of("--python", python)
    assert first.startswith("venv\npip ")
    assert "--constraint" in first and f"--editable {checkout}[test,plot]" in first
    assert calls_of("--python", python) == ""
    assert calls_of() == ""  # the options of the last run hold
    with (checkout / "launch/constraints.txt").open("a") as file:
        file.write("pytest<100\n")
    assert calls_of() == first
    assert "--constraint" not in calls_of("--python", python, "--system-torch")


def test_constraint_admits_only_what_setup_requires():
    """setup.py's lower bound must not exceed the pin, or the environment cannot be made."""
    pin = (LAUNCH / "constraints.txt").read_text().split("torch==")[1].split()[0]
    bound = (ROOT / "setup.py").read_text().split('"torch>=')[1].split('"')[0]
    assert [int(n) for n in bound.split(".")] <= [int(n) for n in pin.split(".")]
