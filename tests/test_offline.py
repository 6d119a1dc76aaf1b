"""`logprobd score`: every format and form of rows, by itself and through a service, and what is wrong with a row."""

import asyncio
import importlib.util
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from logprobd.dialects.plans import ServedModel
from logprobd.messages import ModelInfo
from logprobd.offline import score as score_module
from logprobd.offline.batches import Answer, Batch, Piece, Scored
from logprobd.offline.failures import RefusedError, StoppedError
from logprobd.offline.remote import Remote
from logprobd.offline.rows import Cells, Row, columns_of, row_of
from logprobd.offline.settings import ScoreSettings
from logprobd.offline.workers import Workers
from oracle import own_distribution, own_logprobs, tiny_llama
from running import Running, run_cli, running_service
from score_files import VOCAB, random_rows, read_lines, score, write_lines
from test_tokenizer import word_tokenizer

Handler = Callable[[httpx.Request], httpx.Response]

INFO = ModelInfo("tiny", "tiny", "llama", "f00d", "float32", "float32", VOCAB, 512)


@pytest.fixture(scope="module")
def worded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer."""
    folder = tmp_path_factory.mktemp("worded-llama")
    tiny_llama().save_pretrained(folder)
    backend = word_tokenizer()._tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def worded_service(worded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_service(tmp_path_factory.mktemp("worded") / "log", "--model", str(worded_folder)) as running:
        yield running


def test_every_row_gets_the_models_own_numbers_and_keeps_its_place(
    tiny_folder: Path, tiny_service: Running, tmp_path: Path
) -> None:
    rows = random_rows(150)
    given = write_lines(tmp_path / "in.jsonl", rows)
    options = ("--entropy", "--temperature", "0.7", "--section-rows", "40", "--max-batch-tokens", "100")
    result = run_cli("score", str(given), str(tmp_path / "out.jsonl"), "--model", str(tiny_folder), *options)
    assert result.returncode == 0, result.stderr
    remote = run_cli("score", str(given), str(tmp_path / "remote.jsonl"), "--url", tiny_service.url, *options)
    assert remote.returncode == 0, remote.stderr
    tokens = sum(len(row["prompt"]) + len(row["completion"]) for row in rows)

    assert result.stdout.strip() == f"{tmp_path}/out.jsonl: 150 rows, {tokens} tokens"
    assert "100% |" in result.stderr
    assert "tokens/s" in result.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "remote.jsonl").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", "remote.jsonl"}
    model = tiny_llama()
    for row, scored in zip(rows, read_lines(tmp_path / "out.jsonl"), strict=True):
        prompt, completion = (np.array(row[name], dtype=np.int32) for name in ("prompt", "completion"))
        own = own_distribution(model, prompt, completion, 0.7) if len(completion) else np.zeros((0, VOCAB))
        assert {name: scored[name] for name in row} == row
        assert scored["logprobs"] == pytest.approx(own[np.arange(len(completion)), completion].tolist(), abs=1e-4)
        assert scored["entropy"] == pytest.approx((-np.exp(own) * own).sum(-1).tolist(), abs=1e-4)


def test_a_line_keeps_its_bytes_before_what_is_added(tiny_service: Running, tmp_path: Path) -> None:
    line = '{ "x": 1.50e3, "é": "\\u00e9", "big": 123456789012345678901234567890 , "prompt": [1], "completion": [2] }'
    (tmp_path / "in.jsonl").write_text(f"\n  {line}  \r\n\n", encoding="utf-8")
    score(tmp_path / "in.jsonl", tmp_path / "out.jsonl", url=tiny_service.url)
    written = (tmp_path / "out.jsonl").read_text(encoding="utf-8")

    assert written.startswith(line[:-2] + ',"logprobs":[-')
    assert written.endswith("]}\n")
    assert len(orjson.loads(written)["logprobs"]) == 1


def test_lists_of_completions_nest_as_they_are_and_sums_are_single_numbers(
    tiny_service: Running, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [1, 2], "completion": []},
        {"prompt": [3], "completion": [[4, 5], [], [6]]},
        {"prompt": [1, 2], "completion": [[7]]},
    ]
    given = write_lines(tmp_path / "in.jsonl", rows)
    score(given, tmp_path / "out.jsonl", url=tiny_service.url, top_logprobs=2)
    score(given, tmp_path / "sums.jsonl", url=tiny_service.url, reduce="sum", max_batch_tokens=3)
    nested = read_lines(tmp_path / "out.jsonl")
    sums = [row["sum"] for row in read_lines(tmp_path / "sums.jsonl")]
    own = own_logprobs(tiny_llama(), np.array([3]), np.array([4, 5], dtype=np.int32))

    assert [[len(part) for part in row["logprobs"]] for row in nested] == [[], [2, 0, 1], [1]]
    assert [[len(part) for part in row["top_ids"]] for row in nested] == [[], [2, 0, 1], [1]]
    assert nested[1]["logprobs"][0] == pytest.approx(own.tolist(), abs=1e-4)
    assert [len(row) for row in sums] == [0, 3, 1]
    assert sums[1] == pytest.approx([own.sum(), 0.0, nested[1]["logprobs"][2][0]], abs=1e-4)


def test_a_dpo_file_gets_two_columns_of_sums_in_two_runs(tiny_service: Running, tmp_path: Path) -> None:
    write_lines(tmp_path / "pairs.jsonl", [{"prompt": [1], "chosen": [2, 3], "rejected": [4]}])
    options = {"url": tiny_service.url, "reduce": "sum", "entropy": True}
    for given, out, column in (("pairs", "half", "chosen"), ("half", "both", "rejected")):
        score(
            tmp_path / f"{given}.jsonl",
            tmp_path / f"{out}.jsonl",
            completion_column=column,
            output_column=f"ref_{column}_logps",
            **options,
        )
    (row,) = read_lines(tmp_path / "both.jsonl")

    assert list(row)[3:5] == ["ref_chosen_logps", "ref_chosen_logps_entropy"]
    assert list(row)[5:] == ["ref_rejected_logps", "ref_rejected_logps_entropy"]
    assert row["ref_rejected_logps"] == pytest.approx(
        own_logprobs(tiny_llama(), np.array([1]), np.array([4], dtype=np.int32)).sum(), abs=1e-4
    )


def parquet_table() -> pa.Table:
    columns = {
        "prompt": pa.array([[1, 2], [3], [1, 2]], pa.large_list(pa.int64())),
        "completion": pa.array([[[4], []], [], [[5, 6]]], pa.list_(pa.list_(pa.int32()))),
        "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
        "image": pa.array([b"\x00", None, b"\xff"], pa.binary()),
        "when": pa.array([datetime(2024, 1, 1), None, None], pa.timestamp("ms", tz="UTC")),
    }
    return pa.table(columns).replace_schema_metadata({b"huggingface": b"{}"})


def test_parquet_keeps_its_columns_and_types(tiny_service: Running, tmp_path: Path) -> None:
    table = parquet_table()
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    score(tmp_path / "in.parquet", tmp_path / "out.parquet", url=tiny_service.url, entropy=True, tokens=True)
    scored = pq.read_table(tmp_path / "out.parquet")

    assert scored.select(table.column_names).equals(table)
    assert scored.schema.metadata[b"huggingface"] == b"{}"
    assert scored.column_names[5:] == ["logprobs", "entropy", "token_ids", "tokens"]
    assert scored.schema.field("logprobs").type == pa.list_(pa.list_(pa.field("element", pa.float32())))
    assert scored["token_ids"].to_pylist() == table["completion"].to_pylist()
    assert scored["tokens"].to_pylist() == [[None, None], [], [None]]  # this model has no tokenizer
    expected = own_logprobs(tiny_llama(), np.array([1, 2]), np.array([5, 6], dtype=np.int32))
    assert scored["logprobs"].to_pylist()[2][0] == pytest.approx(expected.tolist(), abs=1e-4)


def test_either_format_can_become_the_other(tiny_service: Running, tmp_path: Path) -> None:
    rows = [
        {"prompt": [1, 2], "completion": [3], "more": {"a": [1]}},
        {"prompt": [1], "completion": [4, 5], "late": 0.5},
    ]
    write_lines(tmp_path / "in.jsonl", rows)
    score(tmp_path / "in.jsonl", tmp_path / "direct.jsonl", url=tiny_service.url)
    score(tmp_path / "in.jsonl", tmp_path / "out.parquet", url=tiny_service.url)
    columns: dict[str, Any] = {
        "prompt": pa.array([[1, 2], [1]]),
        "completion": pa.array([[3], [4, 5]]),
        "price": [Decimal("1.5")] * 2,
    }
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    score(tmp_path / "in.parquet", tmp_path / "out.jsonl", url=tiny_service.url)
    table, direct = pq.read_table(tmp_path / "out.parquet"), read_lines(tmp_path / "direct.jsonl")

    assert table.column_names == ["prompt", "completion", "more", "late", "logprobs"]
    assert table["late"].to_pylist() == [None, 0.5]
    assert np.array_equal(
        np.concatenate(table["logprobs"].to_pylist()).astype(np.float32),
        np.concatenate([row["logprobs"] for row in direct]).astype(np.float32),
    )
    assert read_lines(tmp_path / "out.jsonl") == [
        {"prompt": row["prompt"], "completion": row["completion"], "price": "1.5", "logprobs": row["logprobs"]}
        for row in direct
    ]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_file_without_rows_becomes_one_without_rows(tiny_service: Running, tmp_path: Path, name: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"")
    summary = score(tmp_path / "in.jsonl", tmp_path / name, url=tiny_service.url)

    assert (summary.rows, summary.tokens) == (0, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", name}
    assert name.endswith("jsonl") or pq.read_table(tmp_path / name).column_names == ["logprobs"]


def test_text_is_tokenized_as_the_service_does(worded_folder: Path, worded_service: Running, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "the cat", "completion": " sat"},
        {"prompt": "the", "completion": " cats sat"},
        {"prompt": [2, 3], "completion": " sat"},
        {"prompt": "the cat", "completion": [4]},
    ]
    given = write_lines(tmp_path / "in.jsonl", rows)
    options: dict[str, Any] = {"tokens": True, "top_logprobs": 2}
    score(given, tmp_path / "remote.jsonl", url=worded_service.url, **options)
    score(given, tmp_path / "bare.jsonl", url=worded_service.url, no_special_tokens=True)
    score(given, tmp_path / "out.jsonl", model=str(worded_folder), **options)
    scored = read_lines(tmp_path / "out.jsonl")
    asked = worded_service.post(
        {"groups": [{"prompt": row["prompt"], "completions": [row["completion"]]} for row in rows]}
    ).json()["groups"]

    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "remote.jsonl").read_bytes()
    assert [row["logprobs"] for row in scored] == [group["completions"][0]["logprobs"] for group in asked]
    assert scored[0]["token_ids"] == scored[3]["token_ids"] == [4]
    assert [len(row["tokens"]) for row in scored] == [1, 2, 1, 1]
    assert [len(row["top_tokens"][0]) for row in scored] == [2, 2, 2, 2]
    bare = [row["logprobs"] for row in read_lines(tmp_path / "bare.jsonl")]
    assert bare[0] != scored[0]["logprobs"]
    assert bare[2] == scored[2]["logprobs"]


GOOD = b'{"prompt": [1], "completion": [2]}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt"', "in.jsonl:2: not JSON"),
        (b"[1]", "in.jsonl:2: expected a JSON object"),
        (b'{"prompt": [1], "text": "x"}', "in.jsonl:2: completion: there is no such column; it has prompt, text"),
        (b'{"prompt": [1], "completion": [2], "logprobs": 1}', "in.jsonl:2: logprobs: the column is there already"),
        (b'{"prompt": null, "completion": [2]}', "in.jsonl:2: prompt: expected text or a list of token ids, got null"),
        (b'{"prompt": [1, true], "completion": [2]}', "in.jsonl:2: prompt[1]: expected a token id"),
        (b'{"prompt": [1], "completion": [2, 1.5]}', "in.jsonl:2: completion[1]: expected a token id"),
        (b'{"prompt": [1], "completion": [-1]}', "in.jsonl:2: completion[0]: expected a token id"),
        (b'{"prompt": [1], "completion": {}}', "in.jsonl:2: completion: expected text or a list of token ids"),
        (b'{"prompt": [1], "completion": [[2]]}', "in.jsonl:2: completion: expected a single completion"),
        (b'{"prompt": [], "completion": [2]}', "in.jsonl:2: prompt: an empty prompt cannot score its first token"),
    ],
)
def test_a_bad_line_is_refused_before_any_model_is_loaded(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(RefusedError, match=r".") as refused:
        score(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model="./nowhere")

    assert message in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_bad_completion_of_a_list_is_named(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": [1], "completion": [[2]]}, {"prompt": [1], "completion": [[2], [3, None]]}]
    with pytest.raises(RefusedError, match=r"in\.jsonl:2: completion\[1\]\[1\]: expected a token id .*, got null"):
        score(write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", model="./nowhere")
    single = [rows[0], {"prompt": [1], "completion": "text"}]
    with pytest.raises(RefusedError, match=r"in\.jsonl:2: completion: expected a list of completions"):
        score(write_lines(tmp_path / "in.jsonl", single), tmp_path / "out.jsonl", model="./nowhere")


def test_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    good = write_lines(tmp_path / "in.jsonl", [{"prompt": [1], "completion": [2]}])
    (tmp_path / "bad.parquet").write_bytes(b"no")
    (tmp_path / "there.jsonl").write_bytes(b"")
    for given, out, message in (
        (tmp_path / "nowhere.jsonl", tmp_path / "out.jsonl", "nowhere.jsonl does not exist"),
        (good, tmp_path / "out.csv", "expected a name that ends in .jsonl, .ndjson, .parquet"),
        (good, good, "is the input itself"),
        (good, tmp_path / "nowhere" / "out.jsonl", "there is no folder"),
        (good, tmp_path / "there.jsonl", "--overwrite"),
        (tmp_path / "bad.parquet", tmp_path / "out.jsonl", "not a Parquet file"),
    ):
        with pytest.raises(RefusedError, match=r".") as refused:
            score(given, out, model="./nowhere")
        assert message in str(refused.value)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("columns", "out", "message"),
    [
        ({"prompt": [[1]]}, "out.jsonl", "completion: there is no such column; it has prompt"),
        ({"prompt": [[1]], "completion": [[2]], "logprobs": [1]}, "out.parquet", "logprobs: the column is there"),
        ({"prompt": [[1.5]], "completion": [[2]]}, "out.parquet", "prompt: the column holds list<element: double>"),
        ({"prompt": [[1]], "completion": [1]}, "out.parquet", "completion: the column holds int64"),
        ({"prompt": [[1]], "completion": [[[[1]]]]}, "out.parquet", "completion: the column holds list"),
        ({"prompt": [[1]], "completion": [[2]], "x": [{"y": b"z"}]}, "out.jsonl", "x: the column holds binary"),
        ({"prompt": [[1], [None]], "completion": [[2], [3]]}, "out.jsonl", "in.parquet:2: prompt[0]: expected"),
        ({"prompt": [[1], None], "completion": [[2], [3]]}, "out.jsonl", "in.parquet:2: prompt: expected text"),
    ],
)
def test_a_bad_parquet_file_is_refused(tmp_path: Path, columns: dict[str, Any], out: str, message: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    with pytest.raises(RefusedError, match=r".") as refused:
        score(tmp_path / "in.parquet", tmp_path / out, model="./nowhere")

    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [("text", "no Parquet column can hold this"), ({}, "Parquet has no form for empty objects"), (2**63, "no Parquet")],
)
def test_lines_that_make_no_table_are_refused_as_parquet(tmp_path: Path, value: Any, message: str) -> None:
    rows = [
        {"prompt": [1], "completion": [2], "x": 1 if value else None},
        {"prompt": [1], "completion": [2], "x": value},
    ]
    with pytest.raises(RefusedError, match=message):
        score(write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet", model="./nowhere")


def test_ids_that_the_model_cannot_score_are_refused_before_any_is_scored(
    tiny_folder: Path, tiny_service: Running, tmp_path: Path
) -> None:
    rows = [{"prompt": [1], "completion": [2]}] * 30 + [{"prompt": [1], "completion": [2, VOCAB]}]
    given = write_lines(tmp_path / "in.jsonl", rows)
    here = run_cli("score", str(given), str(tmp_path / "out.jsonl"), "--model", str(tiny_folder))
    there = run_cli("score", str(given), str(tmp_path / "out.jsonl"), "--url", tiny_service.url)
    write_lines(given, [{"prompt": [1] * 512, "completion": [2]}])
    long = run_cli("score", str(given), str(tmp_path / "out.jsonl"), "--url", tiny_service.url)

    assert [result.returncode for result in (here, there, long)] == [2, 2, 2]
    for result in (here, there):
        line = f"{given}:31: completion[1]: token id 211 is not in the vocabulary (0 to 210)"
        assert result.stderr.splitlines()[-1] == f"logprobd: {line}"
    assert f"{given}:1: completion: prompt and completion have 513 tokens; the limit is 512" in long.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_more_top_logprobs_than_tokens_are_refused(tiny_service: Running, tmp_path: Path) -> None:
    given = write_lines(tmp_path / "in.jsonl", [{"prompt": [1], "completion": [2]}])
    with pytest.raises(RefusedError, match="--top-logprobs is 256; the vocabulary has 211 tokens"):
        score(given, tmp_path / "out.jsonl", url=tiny_service.url, top_logprobs=256)


@pytest.mark.parametrize("through", ["model", "url"])
def test_a_text_that_cannot_be_scored_stops_there_or_gets_nulls(
    worded_folder: Path, worded_service: Running, tmp_path: Path, through: str
) -> None:
    rows = [
        {"prompt": "the", "completion": " cat"},
        {"prompt": "the", "completion": " cat" * 600},
        {"prompt": [5], "completion": [6]},
        {"prompt": "the", "completion": [7, VOCAB]},
    ]
    given, out = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    options: dict[str, Any] = {through: str(worded_folder) if through == "model" else worded_service.url}
    with pytest.raises(StoppedError, match=r"in\.jsonl:(2: completion: .*the limit is 512|4: .*not in the vocabulary)"):
        score(given, out, **options)
    assert (tmp_path / "out.jsonl.partial").exists()
    summary = score(given, out, keep_going=True, **options)
    scored = read_lines(out)

    assert (summary.rows, summary.failed) == (4, 2)
    assert [row["logprobs"] is None for row in scored] == [False, True, False, True]
    blamed = [row["error"] and row["error"].partition(":")[0] for row in scored]
    assert blamed == [None, "completion", None, "completion[1]"]
    assert "the limit is 512" in scored[1]["error"]


def test_failures_that_were_kept_stop_a_run_that_has_no_column_for_them(tiny_service: Running, tmp_path: Path) -> None:
    rows = [{"prompt": [1], "completion": [2]}, {"prompt": [1], "completion": [VOCAB]}]
    given, out = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    out.mkdir()  # so that the output cannot get its name
    with pytest.raises(OSError, match=r"out\.jsonl"):
        score(given, out, url=tiny_service.url, keep_going=True, overwrite=True)
    out.rmdir()
    with pytest.raises(StoppedError, match=r"in\.jsonl:2: completion\[0\]: .*as noted by a run with --keep-going"):
        score(given, out, url=tiny_service.url)
    result = run_cli("score", str(given), str(out), "--url", tiny_service.url, "--keep-going")

    assert result.returncode == 1
    assert "2 rows, 1 of them not scored (column error)" in result.stdout


def test_a_model_that_is_refused_ends_the_run_with_1(tmp_path: Path) -> None:
    given = write_lines(tmp_path / "in.jsonl", [{"prompt": [1], "completion": [2]}])
    result = run_cli("score", str(given), str(tmp_path / "out.jsonl"), "--model", "./nowhere")

    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "logprobd: --model nowhere does not exist"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "0"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--reduce", "mean"], "--reduce"),
        (["--top-logprobs", "257"], "--top-logprobs"),
        (["--section-rows", "0"], "--section-rows"),
        (["--url", "127.0.0.1:8000"], "--url: expected an address such as http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1", "--model", "x"], "--model is for a model that is loaded here"),
        (["--url", "http://127.0.0.1:x"], "--url http://127.0.0.1:x: Invalid port"),
        (["--prompt-column", ""], "--prompt-column"),
        (["--port", "1"], "--port"),
    ],
)
def test_impossible_options_are_refused_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(GOOD)
    result = run_cli("score", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *arguments)

    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("library", "options", "message"),
    [("pyarrow", {}, r"logprobd\[parquet\]"), ("httpx", {"url": "http://127.0.0.1"}, r"logprobd\[remote\]")],
)
def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, options: dict[str, str], message: str
) -> None:
    def find(name: str) -> Any:
        return None if name == library else importlib.util.find_spec(name)

    monkeypatch.setattr("logprobd.offline.files.find_spec", find)
    monkeypatch.setattr(score_module, "find_spec", find)
    out = tmp_path / ("out.jsonl" if options else "out.parquet")
    (tmp_path / "in.jsonl").write_bytes(GOOD)
    with pytest.raises(RefusedError, match=message):
        score(tmp_path / "in.jsonl", out, **options)


# What batches are made of.


def rows_of(*rows: tuple[list[int], list[int]]) -> list[Row]:
    columns = columns_of(ScoreSettings())
    return [
        row_of(Cells(number, f"in.jsonl:{number + 1}", *values), columns, grouped=False)
        for number, values in enumerate(rows)
    ]


def numbers(batches: list[Batch]) -> list[list[int]]:
    return [[piece.row.number for piece in batch.pieces] for batch in batches]


SHARED = (([1, 2, 3, 4], [5]), ([6, 7, 8, 9], [1]), ([1, 2, 3, 4], [2]), ([6, 7, 8, 9], [3]), ([1, 2, 3, 4], [4]))


def test_rows_of_one_prompt_come_in_one_batch_wherever_they_stand() -> None:
    settings = ScoreSettings(max_batch_tokens=7)
    workers = Workers(settings, columns_of(settings))
    workers._served, workers.plan = ServedModel(INFO, None, 512), {"layout": "shared", "max_batch_tokens": 7}
    settings = ScoreSettings(url="http://service", max_batch_tokens=7)
    remote = Remote(settings, columns_of(settings))
    remote.plan = {"request_tokens": 7}

    assert numbers(workers.batches(rows_of(*SHARED))) == [[0, 2, 4], [1, 3]]
    assert numbers(remote.batches(rows_of(*SHARED))) == [[0, 2, 4], [1, 3]]


# A service that does as it is told, for what a real one does too rarely.


def answer_to(request: httpx.Request) -> httpx.Response:
    """As the service answers, with the first completion id as every logprob."""
    if request.url.path == "/info":
        model = {"id": "tiny", "path": "tiny", "family": "llama", "fingerprint": "f00d", "weights_version": 3}
        more = {"precision": "float32", "head_precision": "float32", "vocab_size": VOCAB, "max_positions": 512}
        limits = {"max_sequence_tokens": 512, "max_batch_tokens": 100, "request_timeout": 60.0}
        return httpx.Response(200, json={"model": model | more, "limits": limits})
    groups = orjson.loads(request.content)["groups"]
    scores = [[{"logprobs": [float(c[0])] * len(c)} for c in group["completions"]] for group in groups]
    usage = {"prompt_tokens": sum(len(g["prompt"]) for g in groups), "completion_tokens": 1, "computed_tokens": 1}
    return httpx.Response(200, json={"groups": [{"completions": each} for each in scores], "usage": usage})


def error(status: int, code: str, param: str | None = None, **headers: str) -> httpx.Response:
    message = "a reason" if param is None else f"{param}: a reason"
    body = {"error": {"code": code, "message": message, "param": param}}
    return httpx.Response(status, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


def ask(
    handle: Callable[[httpx.Request], httpx.Response], *rows: tuple[list[int], list[int]], **options: Any
) -> Scored:
    """Score rows as one batch through a service that answers so."""
    settings = ScoreSettings(url="http://service", **options)

    async def asking() -> Scored:
        remote = Remote(settings, columns_of(settings), transport=httpx.MockTransport(handle))
        await remote.open(None)
        return await remote.score(Batch([Piece(row, 0) for row in rows_of(*rows)]))

    return asyncio.run(asking())


def firsts(scored: Scored) -> dict[int, Any]:
    return {answer.row: answer.parts.get("logprobs") or answer.parts["error"] for answer in scored.answers}


def in_turn(*answers: httpx.Response | Exception) -> Handler:
    """Answers to the first requests for scores; later ones get what they ask for."""
    left = list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        answer = left.pop(0) if left and request.url.path == "/logprobs" else answer_to(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return handle


def test_a_busy_or_absent_service_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("logprobd.offline.remote.asyncio.sleep", sleep)
    handle = in_turn(
        error(429, "overloaded", retry_after="7"),
        error(503, "draining", retry_after="5"),
        httpx.ConnectError("refused"),
        httpx.Response(502, text="<html>bad gateway</html>"),
    )

    assert firsts(ask(handle, ([1], [2, 3]))) == {0: [2.0, 2.0]}
    assert waits == [7.0, 5.0, 2.0, 4.0]


def test_patience_ends() -> None:
    with pytest.raises(StoppedError, match=r"http://service: overloaded: a reason; gave up after 0\.1 seconds"):
        ask(in_turn(error(429, "overloaded", retry_after="7")), ([1], [2]), retry_timeout=0.1)
    with pytest.raises(StoppedError, match="ConnectError refused; gave up"):
        ask(in_turn(httpx.ConnectError("refused")), ([1], [2]), retry_timeout=0.1)


def test_what_is_wrong_with_all_of_a_request_ends_the_run() -> None:
    for answer, message in (
        (error(401, "unauthorized"), "http://service answered unauthorized: a reason"),
        (error(409, "model_mismatch", "expect.fingerprint"), "answered model_mismatch"),
        (httpx.Response(404, text="nothing here"), "answered HTTP 404: nothing here"),
        (httpx.Response(200, text="hello"), "does not answer as logprobd does"),
        (httpx.Response(200, json=[1]), "does not answer as logprobd does"),
        (httpx.Response(200, json={"groups": [], "usage": {}}), "does not answer as logprobd does"),
    ):
        with pytest.raises(StoppedError, match=message):
            ask(in_turn(answer), ([1], [2]))


def test_an_address_of_something_else_is_refused() -> None:
    with pytest.raises(RefusedError, match="/info does not answer as logprobd does"):
        ask(lambda _request: httpx.Response(200, json={"model": {}}), ([1], [2]))


def test_a_row_that_the_service_blames_fails_and_the_others_are_scored() -> None:
    rows = (([1], [2]), ([1], [3]), ([1], [4]))
    handle = in_turn(
        error(500, "worker_crashed", "groups[1].completions[0]"), error(422, "invalid", "groups[1].prompt[0]")
    )
    scored = ask(handle, *rows)

    assert firsts(scored) == {0: [2.0], 1: "completion: a reason", 2: "prompt[0]: a reason"}
    assert scored.tokens == 2


def test_a_request_that_is_too_large_is_halved() -> None:
    sizes: list[int] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/logprobs":
            sizes.append(len(orjson.loads(request.content)["groups"]))
            if sizes[-1] > 1 or b"[9]" in request.content:
                return error(413, "request_too_large")
        return answer_to(request)

    scored = ask(handle, ([1], [2]), ([1], [9]), ([1], [4]), ([1], [5]))

    assert firsts(scored) == {0: [2.0], 1: "a reason", 2: [4.0], 3: [5.0]}
    assert sizes == [4, 2, 1, 1, 2, 1, 1]


def test_the_key_and_what_is_expected_go_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGPROBD_API_KEY", "secret, other")
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer_to(request)

    ask(handle, ([1], [2]), temperature=0.5)
    body = orjson.loads(seen[1].content)

    assert [request.headers["authorization"] for request in seen] == ["Bearer secret"] * 2
    assert body["expect"] == {"model": "tiny", "weights_version": 3, "fingerprint": "f00d"}
    assert body["temperature"] == 0.5


def test_a_worker_that_fails_a_sequence_fails_its_row() -> None:
    from logprobd.sequences import Failure

    settings = ScoreSettings()
    workers = Workers(settings, columns_of(settings))
    answer = workers._answer(Piece(rows_of(([1], [2]))[0], 0), Failure("worker_crashed", "it died twice"))

    assert answer == Answer(0, 0, {"error": "completion: it died twice"})
