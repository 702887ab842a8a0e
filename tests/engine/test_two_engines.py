"""Two engines in one process, stepping at once, on each kind of kernels and thread pool."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
import numba
from forerun import Engine, SamplingParams

params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
prompts = [[5, 6, 7, 8] * 20] * 3
texts = []

def work(engine):
    for _ in range(10):
        results = engine.generate(prompts, params)
        assert all(each.error is None for each in results), results[0].error
        texts.extend(each.token_ids for each in results)

options = dict(num_threads=2, max_model_len=256, kv_cache_tokens=1024, dtype="float32",
               kernels=sys.argv[2])
engines = [Engine.from_pretrained(sys.argv[1], **options) for _ in range(2)]
threads = [threading.Thread(target=work, args=(engine,)) for engine in engines]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert engines[0].machinery.kernels == sys.argv[2]
assert len(texts) == 60 and len(set(texts)) == 1
print(numba.threading_layer() if sys.argv[2] == "numba" else "none")
"""


@pytest.mark.parametrize(
    ("kernels", "layer"), [("numba", "workqueue"), ("numba", "default"), ("compiled", "workqueue")]
)
def test_two_engines_step_at_once(tiny_compiled, kernels, layer):
    """numba's own pool ends the process when two threads enter it; ours must not let them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_compiled.folder), kernels],
        env=os.environ | {"NUMBA_THREADING_LAYER": layer},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if kernels == "compiled":
        assert done.stdout.split() == ["none"]
    elif layer == "workqueue":
        assert done.stdout.split() == ["workqueue"]
