"""A short training that is killed at random moments and disturbed at every file-system call that writes.

python benchmarks/crash_runs.py    # Linux, with strace; writes results/crash_runs.json, exits with 1 for any fault

First a training is traced that nothing disturbs. Then, at each of its calls that write below the folder of its runs, a
new training is killed, or the call fails with ENOSPC, or with EIO. Each is resumed, and must end with the same bits:
result and metrics apart from times, and the weights' file. Nothing may be left over, and `bisam verify` must be clean.
"""

import argparse
import collections
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: processes are forked here, which threads do not survive

import receipt
import scipy.stats
import sklearn.datasets
import torch._dynamo
from rich.progress import track

from bisam.lab.cli import app

TRAIN = ["train", "demo/40%/bisam-log", "--set", "epochs=3", "--set", "batch=256", "--checkpoint-seconds", "0"]
TIMES = ("seconds", "samples_per_second")
CALLS = (
    "openat,write,pwrite64,writev,fsync,fdatasync,ftruncate,truncate,rename,renameat,renameat2,unlink,unlinkat,rmdir,"
    "mkdir,mkdirat,link,linkat,symlink,symlinkat"
)
DISTURBANCES = {"SIGKILL": "signal=KILL", "ENOSPC": "error=ENOSPC", "EIO": "error=EIO"}
LOADED = (scipy.stats, sklearn.datasets, torch._dynamo)  # here, once, and not in every forked process


class Call(NamedTuple):
    """The `number`-th call of this name in a training; `text` is its line in the trace, without random names."""

    name: str
    number: int
    text: str


@dataclass
class Tally:
    """Counts of what happened, and a line for each fault."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)


def outcome(runs: Path) -> Any:
    """What must not depend on interruptions: all but the times."""
    (folder,) = (path.parent for path in runs.rglob("config.json"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    timeless = [{name: value for name, value in one.items() if name not in TIMES} for one in [*rows, result]]
    return timeless, (folder / "best.safetensors").read_bytes(), sorted(path.name for path in folder.iterdir())


def started(arguments: Sequence[object], log: Path, *, stopped: bool = False) -> int:
    """Fork a process that runs a command; `stopped`: it waits for SIGCONT first. Returns its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        app([*map(str, arguments)])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def traced(arguments: Sequence[object], log: Path, trace: Path, *options: str) -> int:
    """Run a command under strace; its exit code."""
    pid = started(arguments, log, stopped=True)
    os.waitpid(pid, os.WUNTRACED)
    strace = subprocess.Popen(
        ["strace", "-q", "-y", "-s", "0", "-o", trace, "-p", str(pid), "-e", f"trace={CALLS}", *options]
    )
    while "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text():
        if strace.poll() is not None:
            os.kill(pid, signal.SIGKILL)
            raise OSError("strace cannot attach to a process here")
        time.sleep(0.001)
    os.kill(pid, signal.SIGCONT)
    code = ended(pid)
    strace.wait()
    return code


def calls_below(runs: Path, trace: Path) -> list[Call]:
    """The calls of a trace that write below that folder."""
    numbers: collections.Counter[str] = collections.Counter()
    found = []
    for line in trace.read_text().splitlines():
        if not (match := re.match(r"(\w+)\(", line)):
            continue
        name = match[1]
        numbers[name] += 1
        is_read = name == "openat" and not re.search("O_WRONLY|O_RDWR|O_CREAT", line)
        if str(runs) in line and not is_read:
            found.append(Call(name, numbers[name], _text(line, runs)))
    return found


def _text(line: str, runs: Path) -> str:
    """A line of a trace without what differs from process to process: times, handles, random names, the result."""
    line = re.sub(r"\.[0-9a-f]{8}\.tmp", ".RANDOM.tmp", line.split(") = ")[0].replace(str(runs), "RUNS"))
    return re.sub(r"\b\d+<", "<", re.sub(r'""\.\.\., \d+', "BYTES", line))


def disturb(call: Call, kind: str, place: Path, expected: Any, tally: Tally) -> None:
    """Train with one call disturbed, then resume, and compare."""
    runs, log, trace = place / "runs", place / "log", place / "trace"
    inject = f"inject={call.name}:{DISTURBANCES[kind]}:when={call.number}"
    code = traced([*TRAIN, "--runs", runs], log, trace, "-e", inject)
    what = f"{kind} at {call.name} {call.number}, {call.text}"
    hit = next(
        (line for line in reversed(trace.read_text().splitlines()) if "+++" not in line and "---" not in line), ""
    )
    if kind != "SIGKILL":
        hit = next((line for line in trace.read_text().splitlines() if "INJECTED" in line), "")
    if _text(hit, runs).removesuffix(" <unfinished ...>").rstrip(")") != call.text.rstrip(")"):
        tally.faults.append(f"{what}: another call was hit, {_text(hit, runs)}")
    text = log.read_text()
    tally.counts[f"{kind}: {'killed' if code < 0 else 'exit ' + str(code)}"] += 1
    if "Traceback" in text:
        tally.faults.append(f"{what}: a traceback\n{text}")
    elif code == 1 and sum(line.startswith("Error: ") for line in text.splitlines()) != 1:
        tally.faults.append(f"{what}: no error in one line\n{text}")
    elif code not in (0, 1, -signal.SIGKILL):
        tally.faults.append(f"{what}: exit code {code}\n{text}")
    resume(runs, log, what, expected, tally)


def resume(runs: Path, log: Path, what: str, expected: Any, tally: Tally) -> None:
    """Resume a training to its end, and compare."""
    if code := ended(started([*TRAIN, "--runs", runs], log)):
        tally.faults.append(f"{what}: not resumed, exit code {code}\n{log.read_text()}")
        return
    if outcome(runs) != expected:
        tally.faults.append(f"{what}: another end\n{[*outcome(runs)[0], outcome(runs)[2]]}")
    if ended(started(["verify", runs], log)):
        tally.faults.append(f"{what}: not clean\n{log.read_text()}")


def kill_at_random(kills: int, seconds: float, new_place: Callable[[], Path], expected: Any, tally: Tally) -> None:
    """Kill trainings at random moments, and half of those that resume them too."""
    chance = random.Random(0)
    while tally.counts["killed"] < kills:
        place = new_place()
        runs, log, count = place / "runs", place / "log", 0
        while tally.counts["killed"] < kills and (count == 0 or chance.random() < 0.5):
            began = time.monotonic()
            pid = started([*TRAIN, "--runs", runs], log)
            time.sleep(chance.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
            if ended(pid) == 0:
                seconds = time.monotonic() - began  # the machine may be faster or slower than at first
                break
            count += 1
            tally.counts["killed"] += 1
            lines = sum(path.read_bytes().count(b"\n") for path in runs.rglob("metrics.jsonl"))
            tally.counts[f"killed after {lines} epochs"] += 1
        began = time.monotonic()
        resume(runs, log, f"killed {count} times", expected, tally)
        seconds = max(seconds, time.monotonic() - began)
        tally.counts["trainings"] += 1
        shutil.rmtree(place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=100, help="kills at random moments")
    parser.add_argument("--every", type=int, default=1, help="disturb every n-th call only")
    parser.add_argument("--no-save", action="store_true", help="do not write results/crash_runs.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        numbers = iter(range(10**9))

        def new_place() -> Path:
            place = Path(folder, f"{next(numbers):06d}")
            place.mkdir()
            return place

        place = new_place()
        began = time.monotonic()
        assert traced([*TRAIN, "--runs", place / "runs"], place / "log", place / "trace") == 0, place.joinpath(
            "log"
        ).read_text()
        seconds = time.monotonic() - began
        calls, expected = calls_below(place / "runs", place / "trace"), outcome(place / "runs")
        by_name = dict(collections.Counter(call.name for call in calls))
        print(f"{len(calls)} calls in {seconds:.1f} s: {by_name}")
        tally, chance = Tally(), Tally()
        for call in track(calls[:: arguments.every], "every call"):
            for kind in DISTURBANCES:
                place = new_place()
                disturb(call, kind, place, expected, tally)
                shutil.rmtree(place)
        kill_at_random(arguments.random, seconds, new_place, expected, chance)
    faults = [*tally.faults, *chance.faults]
    for fault in faults:
        print(fault)
    print(dict(tally.counts), dict(chance.counts), f"{len(faults)} faults")
    if not arguments.no_save:
        found = {
            "calls": by_name,
            "every_call": dict(sorted(tally.counts.items())),
            "random": dict(sorted(chance.counts.items())),
        }
        print(receipt.save("crash_runs", {"command": TRAIN, **found, "faults": faults}))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
