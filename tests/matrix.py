"""Run the core of the suite with every supported Python, torch, JAX and brainstate: `make
test-matrix`.

Each environment is built once under `.matrix/` with pip, as a user would build it, and kept for the
next run. An environment whose Python is not on this machine is listed as such; one that cannot be
built, or in which a test fails, fails the run.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What meets the libraries: tracing and its hooks, adapters, the compiler's reading of jaxprs, learners
# against torch, and what a new user runs first.
CORE = (
    "test_canary.py",
    "test_docs.py::test_code_runs_as_printed[README.md]",
    "test_docs.py::test_code_runs_as_printed[docs/quickstart.md]",
    "test_frontend_autograd.py",
    "test_frontend_functions.py",
    "test_library_adapters.py",
    "test_compiler_graph.py",
    "test_compiler_module_info.py",
    "test_learner.py",
    "test_frontend_wrap.py",
    "test_check_steps.py",
    "test_op_table.py",
    "test_check.py",
    "test_frontend_errors.py",
    "test_zoo.py",
    "test_user_mode.py",
)


@dataclass(frozen=True)
class Environment:
    """Versions that are tested together."""

    python: str
    torch: str
    jax: str
    brainstate: str

    @property
    def name(self) -> str:
        """Name the folder."""
        return "-".join(
            f"{f.name}{value}" for f, value in zip(fields(self), astuple(self), strict=True)
        )

    def requirements(self) -> list[str]:
        """Pin the libraries; pip chooses the rest."""
        return [
            f"torch=={self.torch}",
            f"jax=={self.jax}",
            f"jaxlib=={self.jax}",
            f"brainstate=={self.brainstate}",
        ]


# JAX 0.11 and brainstate 0.6 need Python 3.12. The last row of each Python is what pip installs
# there by itself.
ENVIRONMENTS = (
    Environment("3.11", "2.13.0", "0.10.2", "0.5.4"),
    Environment("3.11", "2.14.1", "0.10.2", "0.5.4"),
    Environment("3.11", "2.15.0", "0.10.2", "0.5.4"),
    Environment("3.12", "2.14.1", "0.11.2", "0.5.4"),
    Environment("3.12", "2.15.0", "0.12.0.1", "0.6.0"),
    Environment("3.13", "2.13.0", "0.11.2", "0.6.0"),
    Environment("3.13", "2.15.0", "0.12.0.1", "0.6.0"),
)


def find_python(version: str, pythons: list[str]) -> str | None:
    """Find an interpreter of a version: among those that were named, else on the path."""
    for candidate in [*pythons, f"python{version}"]:
        path = shutil.which(candidate)
        if path is None:
            continue
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        found = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if found.stdout.strip() == version:
            return path
    return None


def build(
    environment: Environment, python: str, folder: Path, also: list[str], alone: list[str]
) -> None:
    """Install an environment into its folder; `alone` without dependencies."""
    ready = folder / ".ready"
    steps = [["-e", f"{ROOT}[test]", *environment.requirements(), *also], ["--no-deps", *alone]]
    if ready.exists() and ready.read_text() == repr(steps):
        return
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "-qq",
        "install",
        "--no-warn-conflicts",
    ]
    for step in steps:
        subprocess.run([*pip, *step], check=True)
    ready.write_text(repr(steps))


def run_core(folder: Path, jobs: int) -> tuple[bool, str]:
    """Run the core of the suite; give whether it passed and pytest's summary."""
    tests = [str(ROOT / "tests" / name) for name in CORE]
    command = [
        str(folder / "bin" / "python"),
        "-m",
        "pytest",
        "-q",
        "-n",
        str(jobs),
        "--dist",
        "worksteal",
        *tests,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no tests ran"]
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n")
    return done.returncode == 0, lines[-1].strip("= ")


def check_environment(environment: Environment, options: argparse.Namespace) -> tuple[bool, str]:
    """Build one environment and run the core in it; give whether that is fine, and what to say."""
    python = find_python(environment.python, options.pythons.split())
    if python is None:
        return True, f"not run: no python{environment.python} on this machine"
    folder = Path(options.folder).resolve() / environment.name
    try:
        build(environment, python, folder, options.also.split(), options.alone.split())
    except subprocess.CalledProcessError as error:
        return False, f"cannot be built: {' '.join(error.cmd[1:4])} ... failed"
    return run_core(folder, options.jobs)


def main() -> int:
    """Run the matrix and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", default=str(ROOT / ".matrix"), help="where the environments are"
    )
    parser.add_argument(
        "--pythons",
        default="",
        help="interpreters to use, where `python3.x` on the path is not the one",
    )
    parser.add_argument("--also", default="", help="further packages")
    parser.add_argument("--alone", default="", help="further packages, without their dependencies")
    parser.add_argument(
        "--only", default="", help="run environments whose folder's name contains this"
    )
    parser.add_argument("--jobs", type=int, default=2, help="test processes side by side")
    options = parser.parse_args()
    rows = []
    for environment in ENVIRONMENTS:
        if options.only in environment.name:
            print(f"{environment.name} ...", flush=True)
            rows.append((environment, *check_environment(environment, options)))
    print(f"\n{'python':8}{'torch':8}{'jax':10}{'brainstate':12}result")
    for environment, fine, text in rows:
        python, torch, jax, brainstate = astuple(environment)
        print(f"{python:8}{torch:8}{jax:10}{brainstate:12}{'' if fine else 'FAILED: '}{text}")
    return 0 if all(fine for _, fine, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
