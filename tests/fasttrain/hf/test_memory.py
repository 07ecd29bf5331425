"""However large the model, an export holds a file of it at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from fasttrain.checkpoint.committed import Checkpoint
from fasttrain.config import Config, ModelConfig
from fasttrain.config_toml import to_toml
from fasttrain.model import Decoder
from tests.fasttrain.checkpoint.subject import checksums

MODEL = ModelConfig(layers=40, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=1024)
VOCAB, SHARD = 2048, 10_000_000  # the largest tensor has 2 MB
MEASURED = """
import json, sys, torch
from pathlib import Path
from fasttrain.checkpoint.committed import find
from fasttrain.hf.export import describe, export

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def peak(out, dtype, shard):
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = resident("VmRSS")
    export(source, Path(out), dtype=dtype, shard=shard)
    return resident("VmHWM") - before

checkpoint, directory, shard = sys.argv[1], sys.argv[2], int(sys.argv[3])
source = describe(find(checkpoint), "none")
peak(f"{directory}/first", "bf16", shard)  # what is imported and cached once
print(json.dumps([peak(f"{directory}/{dtype} {size}", dtype, size) for dtype, size in
    (("fp32", shard), ("bf16", shard), ("fp32", 10**9))]))
"""


@pytest.mark.slow
def test_the_peak_is_a_file_and_not_the_model(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    model = Decoder(MODEL, vocab=VOCAB, sequence=8)
    model.init_weights(0)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert size > 15 * SHARD
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    dcp.save({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, checkpoint_id=path, no_dist=True)
    series = dict(recent=[], residuals=[], seen=0, score=0.0, steps=0, reported=False)
    cursor = dict(step=0, used={}, skips=[])
    metadata = dict(
        config=to_toml(Config(model=MODEL)), dataset="", datasets={}, used={}, world_size=1, versions={},
        progress=dict(step=1, tokens=0, cursor=cursor, best_loss=None, misses=0, rollbacks=0),
        monitor={"loss": series, "gradient norm": series, "skipped": 0},
    )  # fmt: skip
    files = checksums(path)
    Checkpoint(path=path, step=1, loss=None, optimizer="", scaler={}, metadata=metadata, files=files).write()
    program = [sys.executable, "-c", MEASURED, str(path), str(tmp_path), str(SHARD)]
    whole_blocks = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is not resident any more
    done = subprocess.run(program, check=True, stdout=subprocess.PIPE, env=whole_blocks)
    fp32, bf16, at_once = json.loads(done.stdout)
    print({"model": size, "fp32": fp32, "bf16": bf16, "in one file": at_once})
    largest = 4 * VOCAB * MODEL.hidden
    assert fp32 < 2 * SHARD + largest
    assert bf16 < 2 * SHARD + largest
    assert at_once > 0.9 * size  # the measure sees it
