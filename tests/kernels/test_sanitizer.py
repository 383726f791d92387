"""compute-sanitizer over every kernel on a GPU: no access outside a buffer, and one planted that it must report."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import kernel_calls
import pytest
import sanitized

SCRIPT = pathlib.Path(__file__).with_name("sanitized.py")
FOUND = 99
NAMES = list(kernel_calls.CALLS)
PATIENCE = 500  # seconds; a part took 39 beside 14 other processes, another more than 200 beside 13
PART = 16  # calls a process: of all in one, memcheck on CUDA 13 has died without a report
PARTS = [names[i : i + PART] for names in (NAMES, list(sanitized.CHECKS)) for i in range(0, len(names), PART)]


def memcheck(cache, *arguments):
    """(exit status, number of errors, output) of sanitized.py under memcheck.

    It runs without first, which fills the compilation cache in the folder `cache`: compilers are slow under memcheck.
    """
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the path nor in the CUDA toolkit")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, SCRIPT.parents[1:3]), os.environ.get("PYTHONPATH", "")]),
        "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",  # sanitized.py says why
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, str(SCRIPT), *arguments]
    subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE)
    checked = [sanitizer, "--tool", "memcheck", "--target-processes", "application-only"]
    checked += ["--error-exitcode", str(FOUND), *command]
    run = subprocess.run(checked, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    output = run.stdout + run.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device or its driver")
    summary = re.search(r"ERROR SUMMARY: (\d+) error", output)
    return run.returncode, summary and int(summary.group(1)), output


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS, ids=range(len(PARTS)))
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_no_kernel_leaves_its_buffers(backend, part, tmp_path):
    status, errors, output = memcheck(tmp_path, backend, *part)
    assert (status, errors) == (0, 0), output[-4000:]
    assert f"calls on {backend} equal the reference" in output
    print(output[-300:])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="memcheck runs them on a GPU")
@pytest.mark.parametrize("name", sanitized.CHECKS)
def test_calls_with_contents_of_their_own_equal_the_reference(name):
    sanitized.CHECKS[name]("interpret")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_a_planted_overrun_is_reported(backend, tmp_path):
    status, errors, output = memcheck(tmp_path, backend, "--planted")
    assert status == FOUND and errors, output[-4000:]
    assert "Invalid __global__ write" in output
