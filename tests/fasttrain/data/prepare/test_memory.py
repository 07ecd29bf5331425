"""Memory does not grow with the corpus."""

import json
import tracemalloc

from fasttrain.config import PrepareConfig
from fasttrain.data.prepare import prepare


def peak(tmp_path, documents: int) -> int:
    path = tmp_path / f"{documents}.jsonl"
    with open(path, "w") as file:
        for i in range(documents):
            file.write(json.dumps({"text": f"document {i} " + "of a few hundred words in all " * 30}) + "\n")
    tracemalloc.start()
    prepare([path], tmp_path / f"{documents}", tokenizer="bytes", settings=PrepareConfig(validation=0), workers=1)
    try:
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_four_times_the_text_takes_no_more_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("fasttrain.data.prepare.inputs.CHUNK_BYTES", 2**17)
    peak(tmp_path, 100)  # what is only made once
    small, large = peak(tmp_path, 1000), peak(tmp_path, 4000)  # 0.9 and 3.6 MB
    assert large < 1.1 * small + 16 * 4000
