"""From steps to documents and back, against the batches themselves and the files that the text came from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttrain import cli, config
from fasttrain.config import PrepareConfig
from fasttrain.data.batches import Batches
from fasttrain.data.cursor import DataCursor, Skip
from fasttrain.data.datasets import training_data
from fasttrain.data.locate import SPLIT, documents_from, locate, occurrences, step_of_token, text_of
from fasttrain.data.prepare import prepare
from fasttrain.data.segments import DataSegment, append_segment, read_segments, segment_at, with_absolute_paths
from fasttrain.rundir import RunDir

T = 16


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Two datasets of one tokenizer: text files, and a JSONL file."""
    root = tmp_path_factory.mktemp("prepared")
    for number in range(12):
        (root / f"text/{number % 3}").mkdir(parents=True, exist_ok=True)
        words = " ".join(f"wörd{number}-{i} π" for i in range(10 + 7 * number))
        (root / f"text/{number % 3}/{number}.txt").write_text(words)
    lines = [json.dumps({"text": f"line {i} " + "says ünicode " * (i % 9 + 1)}) for i in range(40)]
    (root / "lines.jsonl").write_text("\n".join(lines) + "\n")
    options: dict[str, Any] = dict(tokenizer="bytes", settings=PrepareConfig(validation=0, shortest=1), workers=1)
    prepare([root / "text"], root / "a", **options)
    prepare([root / "lines.jsonl"], root / "b", **options)
    return root


def segment_of(data: config.DataConfig, **changes) -> DataSegment:
    opened = training_data(data)
    segment = DataSegment(
        step=0,
        cursor=DataCursor(),
        sequences=6,
        dp_size=2,
        data=with_absolute_paths(data, opened),
        datasets=opened.digests,
    )
    return replace(segment, **changes)


@pytest.fixture
def text(prepared) -> config.DataConfig:
    return config.DataConfig(path=prepared / "a", sequence=T)


@pytest.fixture
def mixed(prepared) -> config.DataConfig:
    parts = {
        "a": config.ComponentConfig(path=prepared / "a", weight=2),
        "b": config.ComponentConfig(path=prepared / "b"),
    }
    return config.DataConfig(mixture=parts, sequence=T)


@pytest.mark.parametrize("kind", ["text", "mixed"])
def test_excerpts_are_the_batches_of_every_rank(tmp_path, request, kind):
    data = request.getfixturevalue(kind)
    segment = segment_of(data, cursor=DataCursor(skips=(Skip(3, 4),)))
    append_segment(tmp_path, segment)
    opened = training_data(data)
    for step in (0, 2, 3, 90):
        excerpts = list(locate(tmp_path, step))
        for rank in range(2):
            batches = Batches(
                opened.components("train"), sequence=T, sequences=6, seed=0, document_mask=True,
                dp_rank=rank, dp_size=2, cursor=segment.cursor,
            )  # fmt: skip
            batch = batches.at(step)
            for row, tokens in enumerate(batch.tokens.numpy()):
                parts = [e for e in excerpts if (e.dp_rank, e.row) == (rank, row)]
                found = [
                    opened.datasets[e.component].split(SPLIT).windows(np.array([e.start]), e.stop - e.start)[0]
                    for e in parts
                ]
                assert np.array_equal(np.concatenate(found), tokens)
                begins = (batch.positions[row] == 0).nonzero()[:, 0].tolist()  # a document, or the sample
                assert [e.start - parts[0].start for e in parts] == begins
        assert len({(e.dp_rank, e.row) for e in excerpts}) == 6


def test_sources_lead_to_the_text_in_its_file(tmp_path, mixed):
    append_segment(tmp_path, segment_of(mixed))
    kinds = set()
    for step in range(20):
        for excerpt in locate(tmp_path, step):
            dataset = training_data(mixed).datasets[excerpt.component]
            source = excerpt.source
            content = source.file.path.read_bytes()[source.offset : source.offset + source.size]
            if excerpt.component == "b":
                content = json.loads(content)["text"].encode()
            stream = dataset.split(SPLIT).windows(np.array([excerpt.start]), excerpt.stop - excerpt.start)[0]
            assert bytes(stream[stream < 256].astype(np.uint8).tolist()) in content
            kinds.add(excerpt.component)
    assert kinds == {"a", "b"}


@pytest.mark.parametrize("kind", ["text", "mixed"])
def test_a_document_is_seen_in_exactly_the_steps_that_hold_it(tmp_path, request, kind):
    data = request.getfixturevalue(kind)
    component = "b" if kind == "mixed" else ""
    append_segment(tmp_path, segment_of(data, cursor=DataCursor(skips=(Skip(5, 3),))))
    append_segment(
        tmp_path, segment_of(data, step=30, dp_size=3, cursor=DataCursor(skips=(Skip(5, 3),)))
    )  # resumed on 3 ranks
    expected: dict[Any, Any] = {}
    for step in range(60):
        for e in locate(tmp_path, step):
            if e.component == component:
                expected.setdefault(e.document, []).append((step, e.dp_rank, e.row, e.sample, e.start, e.stop))
    assert max(rank for places in expected.values() for _, rank, *_ in places) == 2
    for document, places in expected.items():
        found = [tuple(vars(s).values()) for s in occurrences(tmp_path, document, component=component, stop=60)]
        assert sorted(found) == sorted(places)


def test_a_line_undoes_what_a_run_took_back(tmp_path, text):
    first, skipping = segment_of(text), DataCursor(skips=(Skip(12, 5),))
    for segment in (first, replace(first, step=20, dp_size=1), replace(first, step=10, cursor=skipping)):
        append_segment(tmp_path, segment)
    assert [(s.step, s.dp_size) for s in read_segments(tmp_path)] == [(0, 2), (10, 2)]
    assert segment_at(tmp_path, 9) == first
    assert segment_at(tmp_path, 25).cursor == skipping
    with open(RunDir(tmp_path).segments, "a") as file:
        file.write('{"step": 30, "cur')  # a process that died as it wrote
    assert len(read_segments(tmp_path)) == 2


def test_documents_are_found_by_the_file_they_came_from(prepared, text):
    dataset = training_data(text).first
    (number,) = documents_from(dataset, "2/5.txt")
    assert dataset.source(SPLIT, number).file.path == prepared / "text/2/5.txt"
    assert len(documents_from(training_data(replace(text, path=prepared / "b")).first, "lines.jsonl:7")) == 1
    with pytest.raises(ValueError, match="no document of .* came from 9/5.txt"):
        documents_from(dataset, "9/5.txt")


def test_a_token_of_the_run_leads_to_its_step():
    assert [step_of_token([100, 200, 250], position) for position in (0, 99, 100, 249)] == [0, 0, 1, 2]
    with pytest.raises(ValueError, match="has trained on 250 tokens, not on 250"):
        step_of_token([100, 200, 250], 250)


def test_other_data_in_the_same_place_is_an_error(tmp_path, text):
    append_segment(tmp_path, segment_of(text, datasets={"": "0" * 64}))
    with pytest.raises(ValueError, match="is not what the run trained on .* put the former dataset there"):
        list(locate(tmp_path, 0))


def test_steps_of_another_run_are_asked_there(tmp_path, text):
    append_segment(tmp_path, segment_of(text, step=5, before="other/checkpoints/step-00000005"))
    with pytest.raises(ValueError, match="begins at step 5, after other/checkpoints/step-00000005; ask the run"):
        list(locate(tmp_path, 3))


def test_text_without_a_tokenizer_is_numbers(tmp_path):
    np.arange(3, 400, dtype="<u2").tofile(tmp_path / "train.bin")
    data = config.DataConfig(path=tmp_path, vocab=500, separator=50, sequence=T)
    append_segment(tmp_path, segment_of(data))
    parts = list(locate(tmp_path, 0))
    assert all(part.document is None and part.source is None for part in parts)
    first = text_of(training_data(data).first, parts[0].start, parts[0].stop)
    assert first.split()[0] == str(parts[0].start + 3)
    with pytest.raises(ValueError, match="no index of its documents; only steps"):
        list(occurrences(tmp_path, 0, stop=10))


def test_command(tmp_path, text, capsys):
    append_segment(tmp_path, segment_of(text))
    steps = [json.dumps(dict(step=step, tokens=step * 6 * T)) for step in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(steps) + "\n")

    def run(*words: str) -> tuple[int, str]:
        code = cli.main(["data", "locate", str(tmp_path), *words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    expected = list(locate(tmp_path, 2))
    code, out = run("--step", "3", "--json", "--text")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(line["step"], line["start"], line["document"]) for line in lines] == [
        (3, e.start, e.document) for e in expected
    ]
    assert lines[0]["text"] == text_of(training_data(text).first, expected[0].start, expected[0].stop)
    code, out = run("--token", str(2 * 6 * T), "--rank", "1")
    assert code == 0
    assert expected[-1].source.file.path.name in out
    assert "\n     3      1" in out
    name = f"{expected[0].source.file.path.parent.name}/{expected[0].source.file.path.name}"
    code, out = run("--document", name)
    assert code == 0
    assert f"\n     3      {expected[0].dp_rank}" in out
    assert "the run has trained 10 steps; later ones are as they will be" in run("--step", "99")[1]
    for words, message in ((["--step", "0"], "steps count from 1"), (["--step", "x"], "neither a step")):
        with pytest.raises(SystemExit):
            run(*words)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["data", "locate", str(tmp_path / "nowhere"), "--step", "1"])
    assert "is not the directory of a run" in capsys.readouterr().err
