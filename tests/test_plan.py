"""`logprobd plan`: numbers worked out by hand, and those of a service; what is missing or too large is said."""

from pathlib import Path
from typing import Any

import pytest

from configs import SMALL_LAYERS, write_config
from logprobd.engine import memory
from logprobd.plan import (
    CHUNK_SHARE,
    HEAD_CHUNK_BYTES,
    LARGEST_PASS,
    LOGPROB_CHARACTERS,
    SHARE_OF_AVAILABLE,
    TooLargeError,
    attended,
    id_characters,
    plan_lines,
    smallest_replica,
    traffic_of_group,
    work_of_group,
)
from logprobd.plan_settings import PlanSettings
from logprobd.shape import Shape, read_shape
from running import Running, run_cli


def settings(**given: Any) -> PlanSettings:
    return PlanSettings(**{"model": "unused", "group": 3, "prompt": 5, "completion": 4, **given})


@pytest.mark.parametrize("window", [None, 1, 3, 8, 20])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 10), (4, 9), (10, 10)])
def test_attended_keys_are_those_of_a_loop(start: int, end: int, window: int | None) -> None:
    loop = sum(min(depth + 1, window or depth + 1) for depth in range(start, end))

    assert attended(start, end, window) == loop


def test_the_work_of_a_small_group(tmp_path: Path) -> None:
    work = work_of_group(read_shape(write_config(tmp_path)), settings())

    assert work.sequence_tokens == 27
    assert work.computed_tokens == 5 + 3 * 3
    assert work.scored_tokens == 12
    assert work.layers == 2 * SMALL_LAYERS * 14
    # The prompt's tokens attend to 1 + 2 + 3 + 4 + 5 keys, each completion's to 6 + 7 + 8; twice, for two layers.
    assert work.attention == 4 * 8 * 2 * (15 + 3 * 21)
    assert work.head == 2 * 800 * (1 + 3 * 3)
    assert work.saving == 1 - 14 / 27


def test_a_window_bounds_what_its_layers_attend_to(tmp_path: Path) -> None:
    layers = {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]}
    work = work_of_group(read_shape(write_config(tmp_path, **layers)), settings())

    assert work.attention == 4 * 8 * ((15 + 3 * 21) + (9 + 3 * 6))


def test_the_computed_tokens_are_those_of_the_service(tiny_service: Running, tiny_folder: Path) -> None:
    """Completions of distinct first tokens share nothing but the prompt."""
    prompt = [3, 4, 5, 6, 7]
    completions = [[10 + index, 20, 21, 22] for index in range(3)]
    usage = tiny_service.post({"prompt": prompt, "completions": completions}).json()["usage"]

    work = work_of_group(read_shape(tiny_folder), settings())

    assert usage["computed_tokens"] == work.computed_tokens
    assert usage["completion_tokens"] == work.scored_tokens


def test_memory_is_planned_with_the_engine_s_numbers() -> None:
    assert SHARE_OF_AVAILABLE == memory.SHARE_OF_AVAILABLE
    assert CHUNK_SHARE == memory.CHUNK_SHARE
    assert memory.HEAD_CHUNK_BYTES["cuda"] == HEAD_CHUNK_BYTES
    assert memory.LARGEST_PASS["cuda"] == LARGEST_PASS


def billion_shape(**changes: Any) -> Shape:
    """A billion parameters in bfloat16: 2e9 bytes, and 6 x 2 x (2 + 3 x 4 + 2) x 1024 = 192 KiB a token."""
    shape: dict[str, Any] = {
        "family": "llama", "hidden_size": 1024, "intermediate_size": 4096, "query_size": 1024, "vocab_size": 1000,
        "num_heads": 8, "max_positions": 8192, "windows": (None,), "parameters": 10**9, "active": 10**9,
        "item_bytes": 2,
    }  # fmt: skip
    return Shape(**{**shape, **changes})


def test_what_the_weights_leave_goes_to_logits_and_passes() -> None:
    replica = smallest_replica(billion_shape(), settings(device_memory=4 * 10**9))
    free = 0.8 * 2e9

    assert replica.devices == 1
    assert replica.weights == 2e9
    assert replica.head_chunk == free / 16
    assert replica.per_token == 192 * 1024
    assert replica.pass_tokens == int(free * 15 / 16 / (192 * 1024))


def test_precision_is_that_of_the_weights() -> None:
    assert smallest_replica(billion_shape(), settings(precision="float32")).weights == 4e9
    assert smallest_replica(billion_shape(), settings(precision="autocast")).weights == 4e9
    assert smallest_replica(billion_shape(item_bytes=4), settings(precision="bfloat16")).weights == 2e9


def test_a_model_larger_than_a_device_takes_a_group_of_them() -> None:
    replica = smallest_replica(billion_shape(), settings(device_memory=2 * 10**9, devices="8"))

    assert replica.devices == 2
    assert replica.weights == 1e9


def test_a_group_divides_the_heads() -> None:
    with pytest.raises(TooLargeError, match="does not fit: on 1 device of"):
        smallest_replica(billion_shape(num_heads=9), settings(device_memory=2 * 10**9, devices="8"))


def test_traffic_is_what_goes_over_the_wire() -> None:
    traffic = traffic_of_group(billion_shape(), settings())

    assert traffic.binary_in == (5 + 12) * 4
    assert traffic.binary_out == 12 * 4
    assert traffic.json_in == (5 + 12) * id_characters(1000)
    assert traffic.json_out == 12 * 12.5


@pytest.mark.parametrize("vocab_size", [1, 9, 10, 11, 999, 1000, 1001, 49152])
def test_the_characters_of_an_id_are_those_of_all_ids(vocab_size: int) -> None:
    written = ",".join(str(index) for index in range(vocab_size))

    assert id_characters(vocab_size) == pytest.approx((len(written) + 1) / vocab_size)


def test_a_logprob_takes_about_as_many_characters_as_in_a_reply(tiny_service: Running) -> None:
    reply = tiny_service.post({"prompt": [1], "completions": [[index % 100 + 1 for index in range(120)]]}).text
    written = reply.partition('"logprobs":[')[2].partition("]")[0]

    assert 0.75 < (len(written) + 1) / 120 / LOGPROB_CHARACTERS < 1


def lines_of(folder: Path, **given: Any) -> dict[str, str]:
    return dict(plan_lines(settings(model=str(folder), **given)))


def test_speed_follows_from_the_rate(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    flops = work_of_group(read_shape(folder), settings()).flops
    lines = lines_of(folder, rate=str(10 * flops), devices="2", trainers=4, groups=5, step=2)

    assert lines["speed"] == "2 x 120 = 240 scored tokens/s (280 computed)"
    assert lines["rate"].endswith("as given")
    assert lines["demand"] == "20 groups every 2 s = 120 scored tokens/s: load 50%"
    assert lines["enough"] == "1 replicas; all groups at once are answered in 1.0 s"
    assert lines["queue"].startswith("--max-queued-tokens 540 ")


def test_speed_follows_from_a_measurement(tmp_path: Path) -> None:
    lines = lines_of(write_config(tmp_path), measured=140.0, devices="cuda:0,cuda:1,cuda:2")

    assert lines["speed"] == "3 x 120 = 360 scored tokens/s (420 computed)"
    assert "from 140 computed tokens/s measured" in lines["rate"]


def test_an_assumed_rate_says_so(tmp_path: Path) -> None:
    assert "assumed" in lines_of(write_config(tmp_path))["rate"]


def test_the_command_prints_a_line_for_each_part(tmp_path: Path) -> None:
    result = run_cli(
        "plan", "--model", str(write_config(tmp_path)), "--group", "3", "--prompt", "5", "--completion", "4"
    )

    assert result.returncode == 0, result.stderr
    assert [line.split("  ")[0] for line in result.stdout.splitlines()] == [
        "model", "a group", "work", "replicas", "memory", "rate", "speed", "demand", "enough", "queue", "network",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give --model"),
        (["--model", "./nowhere"], 1, "--model nowhere does not exist"),
        (["--model", "not an id"], 1, "not an id is no folder here"),
        (["--model", "{folder}", "--prompt", "60", "--completion", "10"], 1, "70 tokens; the model has 64 positions"),
        (["--model", "{folder}", "--group", "3", "--prompt", "5", "--completion", "4", "--device-memory", "1kB"], 1,
            "does not fit"),
        (["--model", "{folder}", "--rate", "fast"], 2, "--rate"),
        (["--model", "{folder}", "--rate", "0"], 2, "--rate"),
        (["--model", "{folder}", "--devices", "0"], 2, "--devices"),
        (["--model", "{folder}", "--device-memory", "much"], 2, "--device-memory"),
        (["--model", "{folder}", "--group", "0"], 2, "--group"),
        (["--model", "{folder}", "--measured", "-1"], 2, "--measured"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said_in_one_line(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    folder = write_config(tmp_path)
    given = [argument.format(folder=folder) for argument in arguments]
    result = run_cli("plan", *given, HF_HUB_OFFLINE="1")

    assert result.returncode == code
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_options_of_plan_are_variables_too(tmp_path: Path) -> None:
    result = run_cli(
        "plan",
        LOGPROBD_MODEL=str(write_config(tmp_path)),
        LOGPROBD_GROUP="3",
        LOGPROBD_PROMPT="5",
        LOGPROBD_COMPLETION="4",
    )

    assert "14 tokens computed of 27" in result.stdout


def test_help_has_a_line_for_every_option() -> None:
    text = " ".join(run_cli("plan", "--help", COLUMNS="500").stdout.split())

    for name, field in PlanSettings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert f"{field.description} (LOGPROBD_{name.upper()})" in text


def test_a_service_does_not_take_the_variables_of_plan() -> None:
    result = run_cli("serve", LOGPROBD_GROUP="3")

    assert result.returncode == 2
    assert "LOGPROBD_GROUP" in result.stderr


def test_plan_does_not_import_torch(tmp_path: Path) -> None:
    small = ("--group", "3", "--prompt", "5", "--completion", "4")
    result = run_cli("plan", "--model", str(write_config(tmp_path)), *small, PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}

    assert "logprobd.plan" in imported
    assert not imported & {"torch", "transformers"}
