"""lm-evaluation-harness, unmodified: `local-completions` against the service gives what its own `hf` model gives."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from running import Running, environment

ITEMS = [
    ("The capital of France is", [" Paris", " London", " Berlin"], 0),
    ("Two plus two equals", [" four.", " five.", " twenty-two."], 0),
    ("The opposite of hot is", [" warm", " cold", " fire"], 1),
    ("Water is made of hydrogen and", [" nitrogen", " gold", " oxygen"], 2),
    ("A baby dog is called a", [" kitten", " puppy", " calf"], 1),
    ("The sun rises in the", [" east", " west"], 0),
    ("Grass is usually", [" blue", " green", " made of very old wood"], 1),
    ("In the year 1492, Columbus sailed across the", [" Atlantic", " Pacific", " Sahara"], 0),
    ("A triangle has", [" three sides", " four sides", " no sides at all, as everybody knows"], 0),
    ("The largest planet is", [" Jupiter", " Mars"], 0),
    ("Ice melts when it gets", [" warm", " dark", " old"], 0),
    ("Emoji and accents: café 😀 means", [" coffee", " tea", " naïve 😀"], 0),
]

TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""

SCRIPT = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
tasks, out = TaskManager(include_path=sys.argv[1], include_defaults=False), {}
for model, arguments in json.loads(sys.argv[2]).items():
    result = simple_evaluate(model, arguments, tasks=["tiny_choice"], task_manager=tasks, bootstrap_iters=0)
    samples = sorted(result["samples"]["tiny_choice"], key=lambda sample: sample["doc_id"])
    metrics = {name: value for name, value in result["results"]["tiny_choice"].items() if name.startswith("acc")}
    out[model] = {"metrics": metrics, "scores": [sample["filtered_resps"] for sample in samples]}
json.dump(out, open(sys.argv[3], "w"))
"""


def evaluate(folder: Path, models: dict[str, Any]) -> Any:
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"question": q, "choices": c, "answer": a}) + "\n" for q, c, a in ITEMS)
    )
    (folder / "tiny_choice.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
    command = [sys.executable, "-c", SCRIPT, str(folder), json.dumps(models), str(folder / "out.json")]
    offline = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    result = subprocess.run(command, env=environment(**offline), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


def test_a_multiple_choice_task_scores_like_its_own_model(
    embedded_service: Running, embedded_folder: Path, tmp_path: Path
) -> None:
    ours = {
        "base_url": embedded_service.url + "/v1/completions",
        "model": "SmolLM2-135M-Instruct",
        "tokenizer": str(embedded_folder),
        "num_concurrent": 4,
    }
    own = {"pretrained": str(embedded_folder), "dtype": "float32", "device": "cpu", "batch_size": 1}
    results = evaluate(tmp_path, {"local-completions": ours, "hf": own})

    assert results["local-completions"]["metrics"] == results["hf"]["metrics"]
    assert 0 < results["hf"]["metrics"]["acc,none"] < 1  # neither trivially right nor trivially wrong
    pairs = zip(results["local-completions"]["scores"], results["hf"]["scores"], strict=True)
    for (question, choices, _), (through_us, by_itself) in zip(ITEMS, pairs, strict=True):
        assert len(through_us) == len(by_itself) == len(choices), question
        for (our_sum, our_greedy), (own_sum, own_greedy) in zip(through_us, by_itself, strict=True):
            assert float(our_sum) == pytest.approx(float(own_sum), abs=1e-4), question
            assert our_greedy == own_greedy, question
