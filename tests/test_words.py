"""The field's words in source, help and docs: what our early drafts said instead does not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = {  # a pattern of our early drafts, and what the field says
    r"go(es|ing)? on (from|with|bitwise|where|after|in)|went on (from|with)|run goes on": "resumes, continues",
    r"(is|are|was|were) done again|trie[sd] again": "is repeated, retries",
    r"\bJournal\b|\bjournal\b": "RunLogger, progress file",
    r"\b(Judges|judges|Verdicts?|verdicts?|judged|judging)\b": "monitor, detector, anomaly, result",
    r"\b[Ii]ncidents?\b": "event",
    r"\bsee[ns]? to (it|a|the)\b|\bgive_up|\bgives? up after|\bsets? aside\b": "handle, quarantine",
    r"\bleft out\b|\bleave[s]? out\b|\bleft_out\b|\bleft-out\b": "skipped (update), dropped (document), omitted",
    r"\bunsaved\b(?!_steps)|the run is held|\bholds the run\b": "on_save_failure, not saved, pause",
    r"\bfacts\b": "metadata",
    r"\b(no|enough|much|more) room\b|\broom for\b|\bwant of room\b": "disk space",
    r"\b(is|are|newest|a|last) sound\b|\bdamaged?\b(?! was done)": "valid, corrupt",
    r"\bpublished checkpoints?\b|checkpoints? (is|was|are) published": "committed, complete",
    r"optimizer's averages|\btwo averages\b|\bone average\b": "optimizer state, moments",
    r"parallel\.(replicas|reshard|reduce)\b": "dp_replicate, reshard_after_forward, grad_reduce",
    r"\bis_first\b|\bruntime\.world\b|\bon_first\b": "is_main, world_size",
    r"\b[Rr]oll call\b|\brollcall\b|\b[Ll]ost ranks?\b|\bLostRanks\b": "hang detector, rank failure",
    r"\b[Ss]tretch(es)?\b|\bOrigin\b": "data segment, span, data cursor",
    r"\bcame_from\b": "resumed_from",
    r"\bforeign\b": "formats",
    r"\bin pieces\b|\bpieces? of\b|\bPiece\b|\bpieces\b": "chunks",
    r"\bcertif(y|ies|ied|icate)\b": "verify_resume",
    r"\boutlook\b": "estimate",
    r"without traceback|\balone_in\b": "user errors, exclusive lock",
    r"\b[Ss]topwatch\b|\blaps?\b|\bLap\b": "step timer, phases",
    r"\btell=|\btell:": "on_progress=, on_warning=",
    r"\bCPU form\b|\bforms of the op\b|\bnative (code|library|kernels?)\b": "CPU implementation, cpp",
    r"\bmatrix products?\b|\bproducts? of (matrices|two)\b": "matmul",
    r"\bswe(pt|eps?)\b": "chunked forward",
    r"programs that stay|loads that run ahead|\bthe last cache\b|\bmatrix units\b": "persistent, L2, tensor cores",
    r"\bcontenders?\b|\brivals?\b|\bin turns\b|\bthe race\b": "baselines, interleaved runs, comparison",
    r"\btours?\b": "self-check",
    r"vocabulary's tables": "non-embedding + embedding",
    r"all that the model knows": "the context length",
    r"of the allowed error": "OK (32% of tolerance)",
}
FILES = [
    path
    for pattern in (
        "fasttrain/**/*",
        "kernels/**/*",
        "bench/*.py",
        "bench/[!r]*/*.py",
        "docs/**/*.md",
        "*.md",
        "Makefile",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.suffix in (".py", ".md", ".toml", ".cpp", ".h", ".js", ".css", ".html") or path.name == "Makefile"
]


@pytest.mark.parametrize("pattern", WORDS)
def test_words_of_early_drafts_are_gone(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, f"{len(found)} lines; say {WORDS[pattern]}:\n" + "\n".join(found[:40])


def test_the_files_are_found() -> None:
    assert len(FILES) > 250
