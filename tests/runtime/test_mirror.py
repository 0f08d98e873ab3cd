"""Page ids on the device: the kernels and a mirror that follows a session; without a GPU in Triton's interpreter."""

import os
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
COUNTS = [[], [0], [5], [3, 0, 1100, 1, 1024], [2048, 2049]]


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_gather(counts):
    from flashinfer_cascade.runtime.kernels.pages import gather

    rng = np.random.default_rng(0)
    ids = rng.integers(0, 2**31, 5000).astype(np.int32)
    begin = rng.integers(0, 5000 - 2049, len(counts)).astype(np.int32)
    out = np.cumsum([0, *counts]).astype(np.int32)
    into = torch.full((int(out[-1]) + 9,), -1, dtype=torch.int32, device=DEVICE)
    staged = [torch.from_numpy(array).to(DEVICE) for array in (begin, out, ids)]
    gather(*staged, into[4:], max(counts, default=0))
    expected = [ids[b : b + n] for b, n in zip(begin, counts, strict=True)]
    assert into[4 : 4 + out[-1]].tolist() == np.concatenate([*expected, []]).tolist()
    assert into[:4].tolist() == [-1] * 4
    assert into[4 + out[-1] :].tolist() == [-1] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("num", [1, 1023, 1025])
def test_scatter(num):
    from flashinfer_cascade.runtime.kernels.pages import scatter

    rng = np.random.default_rng(num)
    at = rng.permutation(4000)[:num].astype(np.int32)
    values = rng.integers(0, 2**31, num).astype(np.int32)
    expected = np.arange(4000, dtype=np.int32)
    ids = torch.from_numpy(expected.copy()).to(DEVICE)
    expected[at] = values
    # Neither lies aligned where it is staged.
    staged = torch.from_numpy(np.concatenate(([7], at, values)).astype(np.int32)).to(DEVICE)
    scatter(staged[1 : 1 + num], staged[1 + num :], ids)
    assert ids.tolist() == expected.tolist()


@pytest.mark.skipif(not INTERPRETED, reason="the kernels ran on the GPU")
def test_in_the_interpreter():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    # The GPU is what the marker asks for; here the interpreter stands in for it.
    calls = [f"test.test_gather({counts})" for counts in COUNTS] + [f"test.test_scatter({n})" for n in (1, 1025)]
    script = "import importlib.util as u; s = u.spec_from_file_location('test', {!r}); test = u.module_from_spec(s); "
    done = subprocess.run(
        [sys.executable, "-c", script.format(__file__) + "s.loader.exec_module(test); " + "; ".join(calls)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
