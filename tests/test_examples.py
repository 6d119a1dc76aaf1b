"""The client's examples and the recipe of docs/trainers.md, run against a real service."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from oracle import ids_of, own_logprobs
from running import ROOT, Running, environment

EXAMPLES = ROOT / "clients" / "examples"


def output_of(*command: str) -> str:
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def steps_of(text: str, pattern: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def test_grpo_trains_with_the_reference_in_a_service(policy_folder: Path, policy_service: Running) -> None:
    script = str(EXAMPLES / "grpo_remote_reference.py")
    text = output_of(sys.executable, script, str(policy_folder), "--reference", policy_service.url)
    kl = steps_of(text, r"step \d+: .* kl ([\d.e-]+)")

    assert len(kl) == 3
    assert kl[0] == pytest.approx(0, abs=1e-4)  # the policy begins where the reference is


def test_a_student_comes_closer_to_its_teacher(policy_folder: Path, policy_service: Running, tmp_path: Path) -> None:
    student = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    with torch.no_grad():
        for weight in student.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    student.save_pretrained(tmp_path)
    script = str(EXAMPLES / "distill_teacher.py")
    text = output_of(sys.executable, script, str(tmp_path), "--teacher", policy_service.url, "--steps", "40")
    divergence = steps_of(text, r"reverse KL (-?[\d.]+)")

    assert len(divergence) == 40
    assert np.mean(divergence[-8:]) < np.mean(divergence[:8])


def test_curl_asks_for_everything(embedded_service: Running) -> None:
    lines = output_of(str(EXAMPLES / "curl.sh"), embedded_service.url).splitlines()

    assert len(lines) == 6
    assert '"tokens":[" Paris","."]' in lines[2]
    assert '"sum":' in lines[4]
    assert '"text":"The capital of France is Paris"' in lines[5]


def test_the_recipe_for_a_plain_loop_gives_the_models_own_numbers(policy_folder: Path, policy_service: Running) -> None:
    page = (ROOT / "docs" / "trainers.md").read_text()
    recipe = page.partition("<!-- recipe -->\n```python\n")[2].partition("```")[0]
    scope: dict[str, Any] = {}
    exec(recipe.replace("http://127.0.0.1:8000", policy_service.url), scope)
    prompts, completions = [[3, 4, 5], [6]], [[7, 8, 9], [10, 11]]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with scope["client"]:
        reference = scope["reference_logprobs"](prompts, completions, mask.numpy(), 0.8)
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()
    first, second = (
        own_logprobs(model, ids_of(prompt), ids_of(completion), 0.8)
        for prompt, completion in zip(prompts, completions, strict=True)
    )
    loss = scope["grpo_loss"](reference, reference, torch.tensor([1.0, -2.0]), mask, 0.1)

    np.testing.assert_allclose(reference[0], first, atol=1e-4)
    np.testing.assert_allclose(reference[1], [*second, 0.0], atol=1e-4)
    assert float(loss) == pytest.approx((-3 * 1.0 + 2 * 2.0) / 5, abs=1e-6)
