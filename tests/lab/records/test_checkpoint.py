import errno
import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bisam
from bisam.lab.records import checkpoint
from bisam.lab.records.checkpoint import CheckpointError, load, save

import forked

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn]
SMALL = {"lr": 0.1, "weights": torch.arange(6.0).reshape(2, 3)}


def is_same(a, b) -> bool:
    """Equal in type and value, to the bit; strides may differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(k) is type(m) for k, m in zip(a, b, strict=True))
            and is_same([*a.values()], [*b.values()])
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or a.hex() == b.hex()
    return a == b


def bits(tensor) -> bytes:
    values = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def file_of(step) -> str:
    return f"checkpoint-{step:09d}.safetensors"


def round_trip(state, step=7):
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), step, state)
        loaded = load(Path(folder))
    assert loaded.step == step
    assert loaded.notes == []
    return loaded.state


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed, dtype = draw(st.integers(0, 99)), draw(st.sampled_from(DTYPES))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)
    form = draw(st.sampled_from(["as it is", "transposed", "part", "expanded"]))
    if form == "transposed":
        return tensor.mT if tensor.dim() > 1 else tensor
    if form == "part":
        return tensor[..., ::2] if tensor.dim() else tensor
    return tensor.expand(2, *tensor.shape) if form == "expanded" else tensor


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | tensors()
keys = st.text(max_size=3) | st.integers() | st.sampled_from(["1", 1, "a.b", "a", "b", "__metadata__", "sha256"])
nests = st.recursive(
    leaves,
    lambda part: st.lists(part, max_size=3) | st.tuples(part, part) | st.dictionaries(keys, part, max_size=4),
    max_leaves=12,
)


# Round trips.


@settings(max_examples=100)
@given(st.dictionaries(keys, nests, max_size=4))
def test_any_nesting_of_plain_values_and_tensors_is_restored_unchanged(state):
    assert is_same(round_trip(state), state)


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        5e-324,
        0.1 + 0.2,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        math.nan,
        2**63,
        -(2**70),
        10**5000,
        1,
        True,
    ],
    ids=lambda value: str(value)[:12] if not isinstance(value, int) else hex(value)[:12],
)
def test_numbers_are_restored_exactly(value):
    assert is_same(round_trip({"x": value})["x"], value)


@pytest.mark.parametrize("dtype", sorted(checkpoint.DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_every_supported_dtype_is_restored(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    assert is_same(round_trip({"x": tensor})["x"], tensor)


def test_channels_last_tensors_are_restored_with_their_values_as_contiguous_tensors():
    tensor = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    back = round_trip({"x": tensor})["x"]
    assert is_same(back, tensor)
    assert back.is_contiguous()


def test_conjugate_and_negative_views_are_restored_with_their_values():
    z = torch.randn(3, dtype=torch.complex64)
    back = round_trip({"conjugate": z.conj(), "negative": z.conj().imag, "one": z[:1].conj().imag})
    assert torch.equal(back["conjugate"], z.conj())
    assert torch.equal(back["negative"], -z.imag)
    assert torch.equal(back["one"], -z[:1].imag)  # contiguous as it is


def test_tensors_that_share_memory_are_restored_as_separate_tensors():
    x = torch.arange(4.0)
    back = round_trip({"all": x, "again": x, "half": x[:2], "parameter": nn.Parameter(x)})
    assert is_same(back, {"all": x, "again": x, "half": x[:2], "parameter": x})
    back["all"].zero_()
    assert torch.equal(back["again"], x)


def test_keys_whose_paths_look_alike_are_kept_apart():
    state = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), 1: torch.tensor(3), "1": torch.tensor(4)}
    state["__metadata__"] = torch.tensor(5)  # the one name that safetensors keeps for itself
    assert is_same(round_trip(state), state)


def test_a_checkpoint_is_a_plain_safetensors_file_with_the_paths_as_names(tmp_path):
    path = save(tmp_path, 12, {"model": OrderedDict(weight=torch.ones(2)), "groups": [{"lr": 0.1}]})
    assert path == tmp_path / "checkpoint-000000012.safetensors"
    assert list(safetensors.torch.load_file(path)) == ["model.weight"]
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["step"], len(metadata["sha256"])) == ("1", "12", 64)
    assert "groups" in metadata["state"]


def test_equal_states_give_bitwise_equal_files():
    tensors = {name: torch.full((size,), size) for size, name in enumerate(["b", "é", "a", '"sha256":"'])}
    metadata = {f"key {number}": f'"{number}"\n\0é' for number in range(8)}
    (file,) = {b"".join(checkpoint.pack(tensors, metadata)) for _ in range(20)}
    loaded = safetensors.torch.load(file)
    assert {*loaded} == {*tensors}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    again, stored = checkpoint.unpack(file)
    assert {*again} == {*tensors}
    assert {name: stored[name] for name in metadata} == metadata
    (other,) = {b"".join(checkpoint.pack(tensors, dict(reversed(metadata.items())))) for _ in range(5)}
    assert other == file


def test_training_resumes_bit_for_bit_from_a_checkpoint(tmp_path):
    def everything():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = bisam.LookSAM(base, model, rho=0.1, every=3)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(base, 10)

    def train(model, optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.minimize(torch.randn(8, 1, 8, 8), torch.randint(3, (8,)))
            scheduler.step()

    through = everything()
    train(*through, 4)
    state = {name: part.state_dict() for name, part in zip(("model", "optimizer", "scheduler"), through, strict=True)}
    save(tmp_path, 4, {**state, "torch": torch.get_rng_state(), "random": random.getstate()})
    train(*through, 4)

    resumed = everything()
    loaded = load(tmp_path)
    for name, part in zip(("model", "optimizer", "scheduler"), resumed, strict=True):
        part.load_state_dict(loaded.state[name])
    torch.set_rng_state(loaded.state["torch"])
    assert loaded.state["random"] == random.getstate()
    train(*resumed, 4)
    for part, other in zip(through, resumed, strict=True):
        assert is_same(dict(part.state_dict()), dict(other.state_dict()))


# What is refused.


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Odd(), "Odd"),
        ({1, 2}, "set"),
        (b"x", "bytes"),
        (np.float64(1), "numpy.float64"),
        (np.zeros(2), "numpy.ndarray"),
        (torch.Size([1]), "torch.Size"),
        (Counter("ab"), "collections.Counter"),
        (torch.float32, "torch.dtype"),
        (1j, "complex"),
        (torch.zeros(2, dtype=torch.complex128), "torch.complex128"),
        (torch.zeros(2).to_sparse(), "sparse_coo"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_of_other_types_are_refused_with_their_path_and_leave_no_file(tmp_path, value, kind):
    with pytest.raises(TypeError, match=rf"^optimizer\.groups\.1\.lr is .*{kind}"):
        save(tmp_path, 1, {"optimizer": {"groups": [{}, {"lr": value}]}})
    assert names(tmp_path) == []


@pytest.mark.parametrize("key", [None, 1.5, (1, 2), True])
def test_keys_other_than_str_and_int_are_refused_with_their_path(tmp_path, key):
    with pytest.raises(TypeError, match=r"^model has a key of type"):
        save(tmp_path, 1, {"model": {key: 1}})


def test_a_state_that_contains_itself_is_refused(tmp_path):
    state = {}
    state["me"] = state
    with pytest.raises(TypeError, match="contain itself"):
        save(tmp_path, 1, state)


def test_a_state_too_large_for_the_header_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="Put long lists into tensors"):
        save(tmp_path, 1, {"text": "x" * 100_000_001})
    assert names(tmp_path) == []


def test_a_state_too_large_to_be_read_again_is_refused_and_older_checkpoints_stay(tmp_path, monkeypatch):
    path = save(tmp_path, 1, SMALL)
    monkeypatch.setattr(checkpoint, "LARGEST_STATE", path.stat().st_size)
    save(tmp_path, 2, SMALL)
    with pytest.raises(ValueError, match=r"it would have [\d,]+ bytes, and at most [\d,]+ can be read again"):
        save(tmp_path, 3, {**SMALL, "more": torch.zeros(100)})
    assert names(tmp_path) == [file_of(1), file_of(2)]


def test_negative_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match="negative, got -1"):
        save(tmp_path, -1, {})


# Which files are kept.


def test_only_the_newest_two_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 30, 1_000_000_000, 1_000_000_001):
        save(tmp_path, step, {"step": step})
        assert load(tmp_path).state == {"step": step}
    assert names(tmp_path) == [file_of(1_000_000_000), file_of(1_000_000_001)]


def test_a_step_can_be_saved_again(tmp_path):
    save(tmp_path, 1, {"x": 1})
    save(tmp_path, 2, {"x": 2})
    save(tmp_path, 2, {"x": 3})
    assert load(tmp_path).state == {"x": 3}
    assert names(tmp_path) == [file_of(1), file_of(2)]


def test_a_damaged_checkpoint_does_not_count_as_one_of_the_two(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, {"step": step})
    (tmp_path / file_of(2)).write_bytes(b"")
    save(tmp_path, 3, {"step": 3})
    assert names(tmp_path) == [file_of(1), file_of(3)]


def test_an_old_checkpoint_that_cannot_be_removed_is_tolerated(tmp_path):
    (tmp_path / file_of(1)).mkdir()
    for step in (2, 3, 4):
        save(tmp_path, step, {"step": step})
        assert load(tmp_path).step == step
    assert names(tmp_path) == [file_of(1), file_of(3), file_of(4)]


def test_later_checkpoints_are_removed_when_an_earlier_step_is_saved(tmp_path):
    for step in (10, 20):
        save(tmp_path, step, {"step": step})
    save(tmp_path, 15, {"step": 15})
    assert names(tmp_path) == [file_of(10), file_of(15)]
    assert load(tmp_path).step == 15


def test_temporary_files_of_killed_processes_are_removed_and_foreign_files_are_not(tmp_path):
    for name in (file_of(5) + ".tmp", "notes.txt", "checkpoint-best.safetensors"):
        (tmp_path / name).write_text("half")
    assert load(tmp_path) is None
    save(tmp_path, 6, {})
    assert names(tmp_path) == [file_of(6), "checkpoint-best.safetensors", "notes.txt"]


# Damage.


def test_no_folder_and_an_empty_folder_have_no_checkpoint(tmp_path):
    assert load(tmp_path / "none") is None
    assert load(tmp_path) is None


def test_every_truncation_and_every_flipped_bit_is_detected(tmp_path):
    path = save(tmp_path, 1, {"lr": 0.1, "weights": torch.arange(6.0), "flags": (True, None)})
    whole = path.read_bytes()
    flipped = (whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in range(len(whole)))
    for damaged in (*(whole[:length] for length in range(len(whole))), *flipped, whole + b"\0", bytes(len(whole))):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            load(tmp_path)
    path.write_bytes(whole)
    assert load(tmp_path).step == 1


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut in the header": lambda path: os.truncate(path, 30),
    "cut in the tensors": lambda path: os.truncate(path, path.stat().st_size - 5),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "another format": lambda path: rewrite(path, format="2"),
    "renamed": lambda path: rewrite(path, step="3"),
    "no skeleton": lambda path: rewrite(path, state="[1"),
    "a tensor missing": lambda path: rewrite(path, state='{"dict": [["x", {"tensor": "y"}]]}'),
    "another dtype": lambda path: reseal(path, b'"F32"', b'"F64"'),
    "not ours": lambda path: safetensors.torch.save_file({"x": torch.ones(2)}, path),
    "deep": lambda path: path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def rewrite(path, **changes):
    """Rewrites the file with other metadata and a valid digest."""
    tensors, metadata = checkpoint.unpack(path.read_bytes())
    path.write_bytes(b"".join(checkpoint.pack(tensors, {**metadata, **changes})))


def reseal(path, old, new):
    """Rewrites the file with another header of the same length and a valid digest."""
    file = path.read_bytes()
    digest = checkpoint.unpack(file)[1]["sha256"].encode()
    blank = file.replace(digest, b"0" * 64).replace(old, new)
    path.write_bytes(blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode()))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_with_a_note_and_the_previous_one_is_used(tmp_path, damage):
    save(tmp_path, 1, {"step": 1})
    DAMAGE[damage](save(tmp_path, 2, SMALL))
    loaded = load(tmp_path)
    assert (loaded.step, loaded.state, loaded.path) == (1, {"step": 1}, tmp_path / file_of(1))
    (note,) = loaded.notes
    assert note.startswith(f"{file_of(2)} is skipped: ")
    assert note.endswith(f"{file_of(1)} is used instead")


def test_an_older_checkpoint_that_lacks_no_metrics_is_used_or_else_the_newest(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, {"step": step})
    loaded = load(tmp_path, lambda state: "" if state["step"] == 1 else "two lines are missing")
    assert loaded.state == {"step": 1}
    assert loaded.notes == [f"{file_of(2)} is skipped: two lines are missing. {file_of(1)} is used instead"]
    loaded = load(tmp_path, lambda _: "two lines are missing")
    assert loaded.state == {"step": 2}
    assert loaded.notes == [f"{file_of(2)} is used although two lines are missing"]


def test_if_all_checkpoints_are_damaged_the_error_names_them_and_the_remedy(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, SMALL)
    for path in tmp_path.iterdir():
        os.truncate(path, 40)
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    assert all(file_of(step) in str(raised.value) for step in (1, 2))
    assert f"Remove {tmp_path} to start over" in str(raised.value)


def test_loading_a_checkpoint_runs_no_code(tmp_path):
    path = save(tmp_path, 1, SMALL)
    torch.save({"evil": Odd()}, path)
    with pytest.raises(CheckpointError):
        load(tmp_path)


# Folders that cannot be used.


@contextmanager
def unwritable_folder():
    """A folder for `give_up_rights`, after which this process can only read it; the rights are restored at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "folder"
        folder.mkdir()
        Path(name).chmod(0o755)
        try:
            yield folder
        finally:
            os.seteuid(os.getuid())


def give_up_rights(folder):
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)


def test_an_unwritable_folder_is_an_error_with_a_remedy_and_its_checkpoint_loads():
    with unwritable_folder() as folder:
        save(folder, 1, SMALL)
        give_up_rights(folder)
        with pytest.raises(CheckpointError, match=r"cannot write .*Permission denied\. Make it writable"):
            save(folder, 2, SMALL)
        assert load(folder).step == 1


def test_a_file_in_place_of_the_folder_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(CheckpointError, match="move it away or give another folder"):
            save(folder, 1, SMALL)
        with pytest.raises(CheckpointError, match="move it away or give another folder"):
            load(folder)


# Processes that are killed, disks that are full.


def in_a_process(function, *args, within=()):
    """Runs a function of this file in a process of its own, or in an interpreter that a command starts; its output."""
    if within:
        code = f"import sys; sys.path[:] = {sys.path!r}; import {__name__}; {__name__}.{function.__name__}(*{args!r})"
        done = subprocess.run([*within, sys.executable, "-c", code], capture_output=True, text=True)
    else:
        done = forked.run(function, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fill_up(folder, limit):
    """Save until there is no more space."""
    folder = Path(folder)
    for step in (1, 2):
        save(folder, step, {"x": torch.full((25_000,), step)})
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        save(folder, 3, {"x": torch.ones(300_000)})
    except CheckpointError as error:
        cause = errno.errorcode[error.__cause__.errno]
        print(json.dumps({"cause": cause, "message": str(error), "files": names(folder), "step": load(folder).step}))
    save(folder, 4, {})  # a small one, which succeeds
    assert load(folder).step == 4


IN_A_TINY_FILE_SYSTEM = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNT = 'mount -t tmpfs -o size=600k tmpfs "$0" && exec "$@"'


def can_mount(folder) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*IN_A_TINY_FILE_SYSTEM, MOUNT, folder, "true"], capture_output=True).returncode == 0


@pytest.mark.parametrize("shortage", ["full disk", "limited file size"])
def test_without_disk_space_the_old_checkpoint_is_intact_and_no_temporary_file_stays(tmp_path, shortage):
    if shortage == "full disk":
        if not can_mount(tmp_path):
            pytest.skip("no file systems can be mounted here")
        within = (*IN_A_TINY_FILE_SYSTEM, MOUNT, tmp_path)
        found = json.loads(in_a_process(fill_up, str(tmp_path), None, within=within))
        assert found["cause"] == "ENOSPC"
        assert "No space left on device. Free some space" in found["message"]
    else:
        found = json.loads(in_a_process(fill_up, str(tmp_path), 500_000))
        assert found["cause"] == "EFBIG"
        assert "ulimit -f" in found["message"]
    assert found["files"] == [file_of(1), file_of(2)]
    assert found["step"] == 2


def state_of(step):
    return {
        "step": step,
        "x": torch.randn(100_000, generator=torch.Generator().manual_seed(step)),
        "words": ["a"] * step,
    }


def fork(child, *args) -> int:
    """Forks a process that calls `child` and exits at once; returns its id."""
    pid = os.fork()
    if pid == 0:
        try:
            child(*args)
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def ended_by(pid) -> int:
    """The signal that ended the process; 0 if it exited by itself."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code <= 0
    return -code


def check(folder, at_least):
    """Checks that the checkpoint loads and is not older than the last one reported as saved; returns its step."""
    loaded = load(folder)
    assert loaded.notes == []
    assert loaded.step >= at_least
    assert is_same(loaded.state, state_of(loaded.step))
    return loaded.step


def be_killed_at_any_time(folder, kills):
    """A process saves step after step and reports each one; it is killed at random moments."""
    folder, moments, step = Path(folder), random.Random(0), 0
    save(folder, step, state_of(step))

    def save_on(step, pipe):
        while True:
            step += 1
            save(folder, step, state_of(step))
            os.write(pipe, step.to_bytes(8, "little"))

    unfinished = 0
    for _ in range(kills):
        ours, theirs = os.pipe()
        pid = fork(save_on, step, theirs)
        os.close(theirs)
        for _ in range(moments.randrange(3)):
            step = int.from_bytes(os.read(ours, 8), "little")
        time.sleep(moments.random() * 0.02)  # only to make the moment random: the checks hold at every moment
        os.kill(pid, signal.SIGKILL)
        assert ended_by(pid) == signal.SIGKILL
        while reported := os.read(ours, 8):
            step = int.from_bytes(reported, "little")
        os.close(ours)
        unfinished += any(name.endswith(".tmp") for name in names(folder))
        step = check(folder, step)
    save(folder, step + 1, state_of(step + 1))
    assert names(folder) == [file_of(step), file_of(step + 1)]
    print(unfinished)


def test_a_process_killed_repeatedly_while_saving_always_leaves_a_checkpoint(tmp_path):
    unfinished = int(in_a_process(be_killed_at_any_time, str(tmp_path), 40))
    assert unfinished > 0  # some were killed in the middle of writing


def be_killed_at_each_operation(folder):
    """A save is killed at each operation on files in turn, and after several numbers of written bytes."""
    folder, met = Path(folder), []

    def killed_at(count):
        seen = 0

        def kill(event, args):
            nonlocal seen
            if event == "open" or event.startswith(("os.", "shutil.")):
                seen += 1
                if seen == count:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        save(folder, 3, state_of(3))

    def killed_after(size):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        save(folder, 3, state_of(3))

    def after(child, arg):
        for path in folder.iterdir():
            path.unlink()
        for step in (1, 2):
            save(folder, step, state_of(step))
        signal_number = ended_by(fork(child, arg))
        met.append(check(folder, 2))
        save(folder, 4, state_of(4))
        assert names(folder) == [file_of(met[-1]), file_of(4)]
        return signal_number

    count = 1
    while after(killed_at, count) == signal.SIGKILL:
        count += 1
    assert met[0] == 2
    assert met[-1] == 3
    assert met == sorted(met)  # once the new checkpoint exists, it stays
    size = (folder / file_of(4)).stat().st_size
    for limit in (0, 1, 8, 100, 5000, size // 2, size - 100):
        assert after(killed_after, limit) == signal.SIGXFSZ
        assert met[-1] == 2
    print(count)


def test_a_save_killed_at_any_operation_or_byte_leaves_the_old_or_the_new_checkpoint(tmp_path):
    assert int(in_a_process(be_killed_at_each_operation, str(tmp_path))) > 8
