"""Processors with fewer abilities than this one: code for them runs, and computes alike."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from reference.tiny_models import make_decoder, random_prompt, run_decoder, save_tiny_model

from forerun.model.loader import open_model

PROGRAM = """
import sys
from pathlib import Path
import numpy as np, torch
from reference.tiny_models import make_decoder, random_prompt, run_decoder
from forerun.kernels import vector
from forerun.model.loader import open_model

assert not vector.WIDE and not vector.has_feature("avx2")
files = open_model(Path(sys.argv[1]))
decoder = make_decoder(files.config, files.weights, "compiled", quantize=sys.argv[2])
rows = [torch.cat(run_decoder(decoder, [random_prompt(40, seed=1)], cut)) for cut in ((33,), (1,))]
assert torch.equal(*rows), "a row has its bits in any cut here too"
np.save(sys.argv[3], rows[0].numpy())
"""


@pytest.mark.slow  # compiles everything again
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_processor_without_wide_vectors(tmp_path, quantize):
    save_tiny_model(tmp_path, "llama", head_dim=32)
    files = open_model(tmp_path)
    paths = [str(path) for path in sys.path if path]
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), quantize, str(tmp_path / "rows.npy")],
        env=os.environ
        | {
            "NUMBA_CPU_NAME": "generic",
            "NUMBA_CPU_FEATURES": "",
            "FORERUN_HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(paths),
        },
        check=True,
    )
    decoder = make_decoder(files.config, files.weights, "compiled", quantize=quantize)
    expected = torch.cat(run_decoder(decoder, [random_prompt(40, seed=1)]))
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), expected.numpy(), atol=2e-3)
