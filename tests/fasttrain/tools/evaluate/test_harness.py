"""fasttrain eval --tasks: lm-evaluation-harness on tasks of our own, without a network; and its likelihoods by hand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fasttrain import cli
from fasttrain.metrics.jsonl import read_evaluations
from fasttrain.tools.trained_model import load_model
from tests.fasttrain.tools.generate.models import in_transformers

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness (make test-eval)")

QUESTIONS: list[dict[str, Any]] = [
    dict(question="def add(a, b):\n    return", choices=[" a + b", " a, b", " None"], answer=0),
    dict(question="import", choices=[" os", " for", " 1"], answer=0),
    dict(question="", choices=["class", "def", "import"], answer=2),
    dict(question="x = " * 40, choices=[" 1", " while"], answer=0),  # longer than the model's 32 tokens
]
TEXTS = [dict(text="import os\nimport sys\n"), dict(text="def f(x):\n    return x + 1\n" * 9)]
TASKS = {
    "own_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "own_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
""",
    "own_writing": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the tasks, and no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "tasks"
    directory.mkdir()
    for name, body in TASKS.items():
        data = directory / f"{name}.jsonl"
        rows = TEXTS if name == "own_text" else QUESTIONS
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
        (directory / f"{name}.yaml").write_text(head + body)
    return directory


@pytest.fixture(scope="module")
def loaded(small_run: Path):
    return load_model(str(small_run), device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def harness(loaded):
    from fasttrain.tools.harness import Harness

    return Harness(loaded, batch=2)


@pytest.fixture(scope="module")
def likelihoods(loaded):
    """likelihoods(ids, count): by Transformers, the log-likelihood of the last `count` of them, and if it is greedy."""
    theirs = in_transformers(loaded.model)

    def score(ids: list[int], count: int) -> tuple[float, bool]:
        ids = ids[-33:]  # the model knows 32 tokens, and predicts one more
        with torch.no_grad():
            logits = theirs(torch.tensor([ids[:-1]])).logits[0].double()
        targets = torch.tensor(ids[1:])
        losses = F.cross_entropy(logits, targets, reduction="none")[-count:]
        return -float(losses.sum()), bool((logits.argmax(-1) == targets)[-count:].all())

    return score


def requests(*arguments: tuple) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_likelihoods_are_those_of_transformers(harness, loaded, likelihoods):
    asked = [(row["question"], choice) for row in QUESTIONS for choice in row["choices"]]
    tokenizer, begin = loaded.tokenizer(), loaded.separator
    found = harness.loglikelihood(requests(*asked), disable_tqdm=True)
    for (context, continuation), (value, is_greedy) in zip(asked, found, strict=True):
        kept = context.rstrip()  # the harness gives its spaces to the continuation
        known, whole = tokenizer.encode(kept).ids, tokenizer.encode(context + continuation).ids
        expected, likeliest = likelihoods([begin, *known, *whole[len(known) :]], len(whole) - len(known))
        assert value == pytest.approx(expected, rel=1e-5), (context, continuation)
        assert is_greedy == likeliest
    known = tokenizer.encode("import").ids
    likeliest = int(loaded.model.logits(torch.tensor([[begin, *known]]))[0, -1].argmax())
    ((_, is_greedy),) = harness._loglikelihood_tokens([(("", ""), known, [likeliest])])
    assert is_greedy


def test_whole_texts_window_by_window(harness, loaded, likelihoods):
    found = harness.loglikelihood_rolling(requests(*((row["text"],) for row in TEXTS)))
    for row, value in zip(TEXTS, found, strict=True):
        ids = [loaded.separator, *loaded.tokenizer().encode(row["text"]).ids]
        expected, first = 0.0, 0  # windows of 32 predictions; the last one reaches back
        while first < len(ids) - 1:
            last = min(first + 32, len(ids) - 1)
            expected += likelihoods(ids[max(last - 32, 0) : last + 1], last - first)[0]
            first = last
        assert value == pytest.approx(expected, rel=1e-5)
    assert len(ids) > 2 * 32


def test_texts_end_where_the_task_says(harness, loaded):
    free = harness.generate_until(requests(*[(text, dict(until=[], max_gen_toks=9)) for text in ("def ", "import os")]))
    stop = free[0][len(free[0]) // 2 :][:2]
    asked = dict(until=[stop, "never"], max_gen_toks=9)
    (ended,) = harness.generate_until(requests(("def ", asked)))
    assert ended == free[0].split(stop)[0]
    prompt = torch.tensor([[loaded.separator, *loaded.tokenizer().encode("import os").ids]])
    made = in_transformers(loaded.model).generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=9, pad_token_id=0,
        eos_token_id=loaded.separator,
    )[0, prompt.shape[1] :].tolist()  # fmt: skip
    assert free[1] == loaded.tokenizer().decode(made)


def test_the_command(small_run, tmp_path, tasks, capsys, likelihoods, loaded):
    run = shutil.copytree(small_run, tmp_path / "run")
    assert cli.main(["eval", str(run), "--tasks", ",".join(TASKS), "--include-path", str(tasks)]) == 0
    shown = capsys.readouterr().out
    lines = {(line["task"], line["metric"]): line for line in read_evaluations(run)}
    tokenizer = loaded.tokenizer()
    right = 0
    for row in QUESTIONS:
        ids = [[loaded.separator, *tokenizer.encode(row["question"] + choice).ids] for choice in row["choices"]]
        kept = len(tokenizer.encode(row["question"].rstrip()).ids) + 1
        values = [likelihoods(each, len(each) - kept)[0] for each in ids]  # no token reaches over the border here
        right += values.index(max(values)) == row["answer"]
    choice = lines["own_choice", "acc"]
    assert choice["value"] == right / 4
    assert (choice["samples"], choice["fewshot"], choice["step"], choice["filter"]) == (4, 0, 6, "none")
    bits = lines["own_text", "bits_per_byte"]["value"]
    assert lines["own_text", "byte_perplexity"]["value"] == pytest.approx(2**bits)
    assert 0 < bits < math.log2(256)
    assert ("own_writing", "exact_match") in lines
    assert "own_choice" in shown
    assert f"{choice['value']:.4f}" in shown
    assert '"task":"own_choice"' in (run / "report.html").read_text()


def test_fewshot_limit_and_sets_together(small_run, tmp_path, tasks, capsys):
    run = shutil.copytree(small_run, tmp_path / "run")
    options = ["--tasks", "own_choice", "--include-path", str(tasks), "--limit", "2", "--fewshot", "1"]
    assert cli.main(["eval", str(run), *options, "--sequences", "2", "--json"]) == 0
    task, samples = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert (task["samples"], task["fewshot"]) == (2, 1)
    assert samples["set"] == "held-out"
    assert [line.get("task", line.get("set")) for line in read_evaluations(run)] == ["own_choice", "held-out"]


def test_a_task_that_is_not_there(small_run, tasks, capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", str(small_run), "--tasks", "own_choise", "--include-path", str(tasks)])
    assert "has no own_choise" in capsys.readouterr().err
