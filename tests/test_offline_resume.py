"""`logprobd score` after an interruption: nothing is lost, nothing is scored twice, and the file is the same."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from logprobd.offline.batches import Answer, Batch, Scored
from logprobd.offline.failures import RefusedError, StoppedError
from logprobd.offline.journal import Journal
from logprobd.offline.remote import Remote
from running import Running, environment, run_cli
from score_files import random_rows, read_lines, score, write_lines

MANY_BATCHES = {"max_batch_tokens": 64, "section_rows": 50}
FLAGS = ("--max-batch-tokens", "64", "--section-rows", "50", "--entropy")


def start(*arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "logprobd", "score", *arguments]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def kill_at(process: "subprocess.Popen[bytes]", journal: Path, grown: int, seconds: float) -> int | None:
    """Kill once the journal has grown by so many bytes, and some seconds later; the exit code if it ended before."""
    goal = size(journal) + grown
    while process.poll() is None and size(journal) < goal:
        time.sleep(0.001)
    time.sleep(seconds)
    process.kill()
    process.communicate()
    return None if process.returncode == -signal.SIGKILL else process.returncode


def interrupt_until_done(arguments: tuple[str, ...], journal: Path, kills: int, whole: int) -> int:
    """Run, kill at a random moment, run again ..., and let the last run end; returns how many were killed."""
    moments, killed = random.Random(kills), 0
    for _ in range(kills):
        # A moment may be before the first batch, between any two, or while one is written.
        grown = moments.choice((0, 1, moments.randrange(max(1, whole // kills))))
        code = kill_at(start(*arguments), journal, grown, moments.random() * (0.02 if grown else 0.8))
        assert code in (None, 0), f"exit code {code}"
        if code == 0:
            return killed
        killed += 1
    last = start(*arguments)
    _stdout, stderr = last.communicate(timeout=120)
    assert last.returncode == 0, stderr
    return killed


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return random_rows(700, seed=5)


@pytest.mark.parametrize(("suffix", "kills", "num_rows"), [("jsonl", 20, 700), ("parquet", 5, 200)])
def test_a_run_killed_at_random_moments_ends_in_the_same_file(
    tiny_service: Running, tmp_path: Path, rows: list[dict[str, Any]], suffix: str, kills: int, num_rows: int
) -> None:
    given = write_lines(tmp_path / "in.jsonl", rows[:num_rows])
    whole, out = tmp_path / f"whole.{suffix}", tmp_path / f"out.{suffix}"
    flags = ("--url", tiny_service.url, *FLAGS)
    assert run_cli("score", str(given), str(whole), *flags).returncode == 0
    journal = tmp_path / f"out.{suffix}.partial"
    num_bytes = journal_bytes(given, tiny_service.url)
    killed = interrupt_until_done((str(given), str(out), *flags), journal, kills, num_bytes)

    assert killed == kills
    assert out.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {given.name, whole.name, out.name}


def journal_bytes(given: Path, url: str) -> int:
    """How large the journal of an uninterrupted run becomes."""
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "remove", lambda journal: seen.append(size(journal.path)))
        score(given, given.with_name("sized.jsonl"), url=url, entropy=True, **MANY_BATCHES)
    for path in given.parent.glob("sized.*"):
        path.unlink()
    return seen[0]


def test_a_run_that_loads_the_model_goes_on_as_well(
    tiny_folder: Path, tiny_service: Running, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    given = write_lines(tmp_path / "in.jsonl", rows)
    score(given, tmp_path / "whole.jsonl", url=tiny_service.url, entropy=True)  # the same bits in other batches
    flags = ("--model", str(tiny_folder), *FLAGS)
    arguments, journal = (str(given), str(tmp_path / "out.jsonl"), *flags), tmp_path / "out.jsonl.partial"
    codes = [kill_at(start(*arguments), journal, grown, 0.0) for grown in (2_000, 10_000)]
    last = run_cli("score", *arguments, "--devices", "cpu,cpu")  # on other devices, if one likes

    assert codes == [None, None]
    assert last.returncode == 0, last.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_an_interrupt_by_hand_says_how_to_go_on(tiny_service: Running, tmp_path: Path) -> None:
    many = random_rows(5000)  # some seconds' work, so that the interrupt comes before its end
    given, out = write_lines(tmp_path / "in.jsonl", many), tmp_path / "out.jsonl"
    arguments = (str(given), str(out), "--url", tiny_service.url, "--max-batch-tokens", "16")
    process = start(*arguments)
    while size(tmp_path / "out.jsonl.partial") < 2_000 and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 1
    assert stderr.decode().splitlines()[-1] == "logprobd: interrupted; the same command goes on from here"
    assert b"Traceback" not in stderr
    assert score(given, out, url=tiny_service.url, max_batch_tokens=16).rows == len(many)


class Stopping:
    """Lets a remote score some batches, then stops the run; notes what was scored to its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self.scored: list[tuple[int, int]] = []
        score_batch = Remote.score

        async def stopping(remote: Remote, batch: Batch) -> Scored:
            if self.left == 0:
                raise StoppedError("stopped by the test")
            self.left -= 1
            scored = await score_batch(remote, batch)
            self.scored += [(answer.row, answer.completion) for answer in scored.answers]
            return scored

        monkeypatch.setattr(Remote, "score", stopping)
        monkeypatch.setattr(Remote, "lanes", 1)  # so that nothing is under way when it stops


def test_nothing_is_scored_twice(
    tiny_service: Running, tmp_path: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out = write_lines(tmp_path / "in.jsonl", rows[:200]), tmp_path / "out.jsonl"
    options: dict[str, Any] = {"url": tiny_service.url, **MANY_BATCHES}
    whole = score(given, tmp_path / "whole.jsonl", **options)
    stopping = Stopping(monkeypatch)
    for some in (0, 1, 3, 0, 7):
        stopping.left = some
        with pytest.raises(StoppedError, match="stopped by the test"):
            score(given, out, **options)
        assert not out.exists()
    stopping.left = 10_000
    summary = score(given, out, **options)

    assert sorted(stopping.scored) == [(row, 0) for row in range(200)]
    assert summary == whole
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.fixture
def begun(tiny_service: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, dict[str, Any]]:
    """A run that stopped after two batches: its files and options."""
    given, out = write_lines(tmp_path / "in.jsonl", random_rows(60)), tmp_path / "out.jsonl"
    options: dict[str, Any] = {"url": tiny_service.url, **MANY_BATCHES}
    with monkeypatch.context() as patch:
        Stopping(patch).left = 2
        with pytest.raises(StoppedError):
            score(given, out, **options)
    return given, out, options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.5}, "--temperature 1.0, and now it is 0.5"),
        ({"entropy": True}, "--entropy False, and now it is True"),
        ({"max_batch_tokens": 65}, "--max-batch-tokens 64, and now it is 65"),
        ({"section_rows": 51}, "--section-rows 50, and now it is 51"),
    ],
)
def test_other_options_do_not_go_on(
    begun: tuple[Path, Path, dict[str, Any]], change: dict[str, Any], message: str
) -> None:
    given, out, options = begun
    kept = out.with_name("out.jsonl.partial").read_bytes()
    with pytest.raises(RefusedError) as refused:
        score(given, out, **(options | change))

    assert f"{out}.partial was begun with {message}: go on as it was begun, or start anew" in str(refused.value)
    assert out.with_name("out.jsonl.partial").read_bytes() == kept
    assert score(given, out, **(options | change), overwrite=True).rows == 60
    fresh = out.with_name("fresh.jsonl")
    score(given, fresh, **(options | change))
    assert out.read_bytes() == fresh.read_bytes()


def test_another_input_does_not_go_on(begun: tuple[Path, Path, dict[str, Any]]) -> None:
    given, out, options = begun
    write_lines(given, random_rows(60, seed=1))
    with pytest.raises(RefusedError, match=r"begun with the input \(digest\)"):
        score(given, out, **options)
    with pytest.raises(RefusedError, match="begun with scoring 'through --url', and now it is 'by itself'"):
        score(write_lines(given, random_rows(60)), out, **MANY_BATCHES, model="./nowhere")


def test_another_model_does_not_go_on(begun: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    given, out, options = begun
    journal = out.with_name("out.jsonl.partial")
    first, rest = journal.read_bytes().split(b"\n", 1)
    header = orjson.loads(first)
    header["header"]["model"]["fingerprint"] = "0" * 16
    journal.write_bytes(orjson.dumps(header) + b"\n" + rest)
    with pytest.raises(RefusedError, match="begun with fingerprint '0000000000000000', and now it is"):
        score(given, out, **options)

    assert score(given, out, **options, overwrite=True).rows == 60
    assert read_lines(out)[0]["logprobs"] is not None


def test_a_journal_is_whole_up_to_its_last_whole_line_wherever_it_is_torn(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.begin({"about": {}})
    journal.add(0, 0, 2, 5, 7, [Answer(1, 0, {"logprobs": [-0.5]})])
    journal.add(0, 1, 2, 6, 8, [Answer(0, 0, {"logprobs": [-1.5]}), Answer(2, 0, {"error": "x"})])
    journal.close()
    text = (tmp_path / "journal").read_bytes()
    ends = [place + 1 for place, byte in enumerate(text) if byte == ord("\n")]
    for end in range(len(text) + 1):
        (tmp_path / "torn").write_bytes(text[:end])
        torn = Journal(tmp_path / "torn")
        whole = sum(line_end <= end for line_end in ends)

        assert torn.header == (None if whole == 0 else {"about": {}})
        assert torn.sections[0].batches == set(range(max(0, whole - 1)))
        assert torn.sections[0].is_complete == (whole == 3)
        assert (torn.weight, torn.tokens) == [(0, 0), (0, 0), (5, 7), (11, 15)][whole]
        assert [answer.row for answer in torn.answers()] == [[], [], [1], [1, 0, 2]][whole]
        torn.close()
        assert size(tmp_path / "torn") == max([0, *(line_end for line_end in ends if line_end <= end)])


def test_what_follows_an_unreadable_line_is_scored_again(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b'{"header":{}}\n\0\0\0\n{"finished":true}\n')
    journal = Journal(tmp_path / "journal")

    assert journal.header == {}
    assert not journal.finished
    journal.close()
    assert (tmp_path / "journal").read_bytes() == b'{"header":{}}\n'


def test_two_runs_into_one_file_are_refused(begun: tuple[Path, Path, dict[str, Any]]) -> None:
    given, out, options = begun
    first = Journal(out.with_name("out.jsonl.partial"))
    with pytest.raises(RefusedError, match="another process scores into the same file"):
        score(given, out, **options)
    first.close()
    assert score(given, out, **options).rows == 60


def test_a_run_that_ended_between_its_output_and_its_journal_is_done(
    begun: tuple[Path, Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out, options = begun
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", lambda _journal: None)
        score(given, out, **options)
    written = out.read_bytes()
    shutil.copy(out, out.with_name("copy.jsonl"))
    options["url"] = "http://127.0.0.1:9"  # nobody is there, and nobody is asked
    summary = score(given, out, **options)

    assert summary.rows == 60
    assert out.read_bytes() == written
    assert not out.with_name("out.jsonl.partial").exists()
    with pytest.raises(RefusedError, match="exists"):
        score(given, out, **options)


def test_a_complete_journal_needs_no_model_to_be_written_out(
    begun: tuple[Path, Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out, options = begun

    def fail(*_arguments: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("logprobd.offline.score.write", fail)
        with pytest.raises(OSError, match="no space left"):
            score(given, out, **options)
    assert not out.exists()
    assert score(given, out, **(options | {"url": "http://127.0.0.1:9"})).rows == 60


def test_an_input_that_changes_while_it_is_read_is_noticed(
    begun: tuple[Path, Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out, options = begun
    score_batch = Remote.score

    async def changing(remote: Remote, batch: Batch) -> Scored:
        with given.open("ab") as file:
            file.write(b"\n")
        return await score_batch(remote, batch)

    monkeypatch.setattr(Remote, "score", changing)
    with pytest.raises(StoppedError, match=r"in\.jsonl was changed while it was read"):
        score(given, out, **options)
    assert not out.exists()


def test_a_reference_that_changes_under_a_run_ends_it(
    begun: tuple[Path, Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out, options = begun
    ask_first = Remote.open

    async def open_before_it_changes(remote: Remote, plan: dict[str, Any] | None) -> Any:
        served = await ask_first(remote, plan)
        remote._options["expect"] |= {"fingerprint": "0" * 16}
        return served

    monkeypatch.setattr(Remote, "open", open_before_it_changes)
    with pytest.raises(StoppedError, match="answered model_mismatch: expected fingerprint"):
        score(given, out, **options)
