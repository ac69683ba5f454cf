"""A training that is killed, or meets a full disk, at calls that write files: resumed, it ends with the same bits.

The writes of some files, and a few other calls, chosen by a fixed seed. `benchmarks/crash_runs.py` disturbs every
system call, and kills at 100 random moments.
"""

import errno
import io
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import forked

TRAIN = ["train", "demo/40%/sgd", "--set", "epochs=2", "--set", "batch=512", "--checkpoint-seconds", "0", "--runs"]
EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
ALWAYS = ("write config", "write metrics", "write result")
CALLS, MOMENTS = 5, 2


def disturb(folder, number, kind, log):
    """Log each call of this process that writes below the folder; at call `number`, kill this process or raise."""
    handles, seen = {}, 0

    def on_call(name, path):
        nonlocal seen
        path = handles.get(path, path)
        if not str(path).startswith(folder):
            return
        seen += 1
        print(name, Path(path).name.split(".")[0], file=log, flush=True)
        if seen == number and kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if seen == number:
            raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))

    def audit(event, arguments):
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            on_call("open", arguments[0])
        elif event in EVENTS:
            on_call(event, arguments[-1] if arguments[-1] in handles else arguments[0])  # the first may be relative

    class File(io.FileIO):
        def write(self, data):
            on_call("write", self.fileno())
            return super().write(data)

    def opened(path, flags, mode=0o777, **options):
        handle = original_open(path, flags, mode, **options)
        handles[handle] = path
        return handle

    def before(name, function):
        def call(handle, *arguments):
            on_call(name, handle)
            return function(handle, *arguments)

        return call

    original_open, fdopen = os.open, os.fdopen
    os.open, os.fsync, os.write = opened, before("fsync", os.fsync), before("write", os.write)
    os.fdopen = lambda handle, mode: io.BufferedWriter(File(handle, "w")) if mode == "wb" else fdopen(handle, mode)
    sys.addaudithook(audit)


def start(runs, number=0, kind=""):
    """Train in a forked process, which does not have to import everything again; returns its id."""
    from bisam.lab.cli import app

    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        output = os.open(runs.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        with runs.with_suffix(".calls").open("w") as log:
            disturb(str(runs), number, kind, log)
            app([*TRAIN, str(runs)])
    except SystemExit as end:
        code = end.code
    finally:
        os._exit(code)


def ended(pid) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome(runs):
    """The parts of a record that must not depend on interruptions: all but the times."""
    (folder,) = (path.parent for path in runs.rglob("config.json"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows.append(json.loads((folder / "result.json").read_text()))
    timeless = [{k: v for k, v in row.items() if k not in ("seconds", "samples_per_second")} for row in rows]
    return timeless, (folder / "best.safetensors").read_bytes(), sorted(path.name for path in folder.iterdir())


def crash(place):
    """Prints how many trainings were disturbed, by kind, and the kinds of calls."""
    from bisam.lab import records

    place, chance = Path(place), random.Random(0)
    began = time.monotonic()
    assert ended(start(place / "whole")) == 0, (place / "whole.log").read_text()
    seconds = time.monotonic() - began
    expected, calls = outcome(place / "whole"), (place / "whole.calls").read_text().splitlines()
    done = dict.fromkeys(["SIGKILL", "ENOSPC", "moments"], 0)

    def resumed(runs, what):
        assert ended(start(runs)) == 0, f"{what}: {runs.with_suffix('.log').read_text()}"
        assert outcome(runs) == expected, what
        (record,) = records.find_records(runs)
        assert records.verify(record) + records.weights_problems(record) == [], what

    always = [calls.index(call) + 1 for call in ALWAYS]
    others = [number for number in range(1, len(calls) + 1) if number not in always]
    for number in sorted([*always, *chance.sample(others, CALLS - len(always))]):
        for kind in ("SIGKILL", "ENOSPC"):
            runs, what = place / f"{kind}{number}", f"{kind} at call {number}, {calls[number - 1]}"
            code, text = ended(start(runs, number, kind)), runs.with_suffix(".log").read_text()
            assert code == -signal.SIGKILL if kind == "SIGKILL" else code in (0, 1), f"{what}: {code} {text}"
            assert "Traceback" not in text, text
            assert text.count("Error: ") == (code == 1), text
            resumed(runs, what)
            done[kind] += 1
    for moment in range(MOMENTS):
        runs = place / f"moment{moment}"
        pid = start(runs)
        time.sleep(chance.uniform(0, seconds))  # only to make the moment random: the checks hold at every moment
        os.kill(pid, signal.SIGKILL)
        ended(pid)
        resumed(runs, f"moment {moment}")
        done["moments"] += 1
    print(json.dumps({**done, "calls": sorted({call.split()[0] for call in calls})}))


def test_a_training_killed_or_out_of_space_at_a_write_resumes_and_ends_with_the_same_bits(tmp_path):
    done = forked.run(__file__, tmp_path)  # it has imported everything: the trainings are forked from it
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "SIGKILL": CALLS,
        "ENOSPC": CALLS,
        "moments": MOMENTS,
        "calls": ["fsync", "open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "write"],
    }


if __name__ == "__main__":
    crash(sys.argv[1])
