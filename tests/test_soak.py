"""The soak of `make soak`, a few seconds of it."""

import json
import subprocess
import sys

from running import ROOT, environment


def test_traffic_and_faults_lose_nothing_and_break_nothing() -> None:
    command = [sys.executable, str(ROOT / "tests" / "soak.py"), "--seconds", "15", "--clients", "16"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)

    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(result.stdout)
    assert figures["wrong or lost"] == 0
    assert figures["kills"] >= 1
    assert figures["sent"]["whole"] > 50
    assert set(figures["answered by status"]) <= {"200", "400", "422", "499"}
