"""One training on several processes: who they are, what they share, and how they agree."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from bisam.lab.config import Config
from bisam.lab.methods import METHODS, uses
from bisam.lab.training import sharding

T = TypeVar("T")

PERTURBATIONS = {"rank": "local", "global": "global"}
"""Values of --perturb, and the `sharpness` of the optimizer that each stands for."""


class RankLost(RuntimeError):  # noqa: N818
    """Another process of the training has ended."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a training, as one of them sees them. By itself this is the only one."""

    rank: int = 0
    count: int = 1
    perturb: str = "rank"
    sync_batchnorm: bool = False
    shard: bool = False
    """FSDP2 in place of DistributedDataParallel: each process holds a part of the model."""

    @property
    def is_first(self) -> bool:
        """Whether this one writes records."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.count == 1

    def described(self) -> dict[str, Any]:
        """For a receipt; empty for one process."""
        if self.is_alone:
            return {}
        return {"ranks": self.count, **self.options}

    @property
    def options(self) -> dict[str, Any]:
        return {"perturb": self.perturb, "sync_batchnorm": self.sync_batchnorm, "shard": self.shard}

    def adapted(self, config: Config) -> Config:
        """The run that these processes train: each perturbs micro-batches of its own part of the batch.

        Perturbation per rank is that of one process with `micro_batch` = batch / ranks, so that is what the record has,
        and any number of ranks that share micro-batches evenly can resume it.

        >>> Ranks(0, 4).adapted(Config(method="sam")).micro_batch
        32
        >>> Ranks(0, 4, perturb="global").adapted(Config(method="sam")).micro_batch
        """
        if self.is_alone:
            return config
        own, left = divmod(config.batch, self.count)
        if left:
            raise ValueError(
                f"a batch of {config.batch} cannot be shared evenly by {self.count} ranks: set another, as in "
                f"--set batch={max(own, 1) * self.count}"
            )
        if not (METHODS[config.method].perturbs and uses(config.method, "micro_batch")):
            return config
        if config.micro_batch is None:
            return replace(config, micro_batch=own) if self.perturb == "rank" else config
        if self.perturb == "global":
            raise ValueError(
                f"micro_batch={config.micro_batch} perturbs micro-batches each by itself, and "
                f"{'--shard' if self.shard else '--perturb global'} all samples alike: use one of them"
            )
        if own % config.micro_batch:
            raise ValueError(
                f"micro-batches of {config.micro_batch} do not fit evenly into the {own} samples of each of "
                f"{self.count} ranks: use another number of ranks, or --set micro_batch={own}"
            )
        return config

    def half(self, batch: int) -> int:
        """About half of a batch, which these processes can share.

        >>> Ranks(0, 3).half(64)
        30
        """
        return max(batch // 2 // self.count, 1) * self.count

    def refuse_together(self, together: int) -> None:
        if together > 1 and not self.is_alone:
            raise ValueError(f"{self.count} ranks train one run at a time: remove --together {together}")

    def sharpness(self, config: Config) -> str | None:
        """The option of the optimizer; None for one process."""
        if self.is_alone:
            return None
        return "local" if config.micro_batch is not None else PERTURBATIONS[self.perturb]

    @property
    def held(self) -> sharding.WholeModel:
        """What this process holds of a model, and how its state is gathered."""
        return sharding.ShardedModel() if self.shard else sharding.WholeModel()

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model to train: the same one for one process."""
        if self.is_alone:
            return model
        device = next(model.parameters()).device
        if self.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        if self.shard:
            sharding.shard(model, self.count)
            return model
        if device.type != "cuda":
            return DistributedDataParallel(model)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # a captured step cannot use what was made on the default stream
            wrapped = DistributedDataParallel(model, device_ids=[device.index])
        torch.cuda.current_stream(device).wait_stream(side)
        return wrapped

    # What follows waits for all processes; by itself each returns what it was given.

    def sum_(self, *tensors: Tensor) -> None:
        """Add up these tensors over the processes, in place."""
        if not self.is_alone:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def share_buffers(self, model: nn.Module) -> None:
        """Give every process the first one's buffers, as DistributedDataParallel does before a pass."""
        if not self.is_alone:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def any(self, flag: bool) -> bool:
        """Whether it is true in any process."""
        if self.is_alone:
            return flag
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=_control())
        return bool(found)

    def of_first(self, value: T) -> T:
        """The first process's value."""
        if self.is_alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=_control())
        return box[0]

    def gathered(self, value: T) -> list[T]:
        """The values of all processes, in the first one; the others have an empty list."""
        if self.is_alone:
            return [value]
        found: list[Any] | None = [None] * self.count if self.is_first else None
        dist.gather_object(value, found, 0, group=_control())
        return found or []

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """The first process goes through the block alone: it may download what the others then find."""
        if not self.is_alone and not self.is_first:
            dist.barrier(group=_control())
        yield
        if not self.is_alone and self.is_first:
            dist.barrier(group=_control())

    def refuse_unlike(self, fields: Mapping[str, Any]) -> None:
        """ValueError in every process if one was started with other values, naming the first such field."""
        if self.is_alone:
            return
        found: list[Mapping[str, Any]] = [{}] * self.count
        dist.all_gather_object(found, dict(fields), group=_control())
        for rank, theirs in enumerate(found):
            for name in [*found[0], *(name for name in theirs if name not in found[0])]:
                ours, other = found[0].get(name, "none"), theirs.get(name, "none")
                if ours != other:
                    raise ValueError(
                        f"rank {rank} has {name}={other}, and rank 0 has {name}={ours}: start all ranks with the same "
                        "command"
                    )


ALONE = Ranks()

_CONTROL: list[Any] = []


def _control() -> Any:
    """The group for numbers on the host, which NCCL cannot send."""
    return _CONTROL[-1]


def environment() -> tuple[int, int] | None:
    """Rank and number of ranks, where torchrun has started this process; None elsewhere."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextmanager
def joined(
    device: torch.device, *, perturb: str = "", sync_batchnorm: bool = False, shard: bool = False
) -> Iterator[Ranks]:
    """Join the processes that torchrun has started, or that share a group already; alone where there are none.

    `perturb` is "rank" or "global"; empty is "rank", or "global" with `shard`. An error of a collective, after another
    process has ended, is a `RankLost`.
    """
    given = {"--perturb": bool(perturb), "--sync-batchnorm": sync_batchnorm, "--shard": shard}
    perturb = _perturbation(perturb, shard=shard)
    is_ours = not dist.is_initialized()
    if is_ours:
        if environment() is None:
            _refuse_alone([option for option, is_given in given.items() if is_given])
            yield ALONE
            return
        _init("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    _CONTROL.append(dist.new_group(backend="gloo"))
    try:
        if count > 1:
            _refuse_on_cpu(device, sync_batchnorm=sync_batchnorm, shard=shard)
        yield Ranks(rank, count, perturb, sync_batchnorm, shard and count > 1)
    except RuntimeError as error:
        if not is_of_collective(error):
            raise
        raise RankLost(
            f"rank {rank} stops: another process of this training has ended. Its own message is above or in its log; "
            "torchrun --max-restarts N starts all ranks again, and they resume from the last checkpoint"
        ) from error
    finally:
        _CONTROL.pop()
        if is_ours:
            dist.destroy_process_group()


def _perturbation(given: str, *, shard: bool) -> str:
    if given not in ("", *PERTURBATIONS):
        raise ValueError(f"--perturb is rank or global, got {given!r}")
    if shard and given == "rank":
        raise ValueError(
            "--shard perturbs all ranks alike, since none of them has a whole gradient: remove --perturb rank"
        )
    return given or ("global" if shard else "rank")


def _refuse_alone(options: list[str]) -> None:
    if options:
        listed = " and ".join(options)
        raise ValueError(f"{listed} needs several processes: start them with torchrun, or remove {listed}")


def _refuse_on_cpu(device: torch.device, *, sync_batchnorm: bool, shard: bool) -> None:
    if device.type == "cuda":
        return
    if sync_batchnorm:
        raise ValueError("torch has SyncBatchNorm on CUDA only: remove --sync-batchnorm")
    if shard and torch.__version__ < "2.7":
        raise ValueError("torch 2.6 has FSDP2 on CUDA only: use torch 2.7 or newer, or remove --shard")


def _init(backend: str) -> None:
    """With keys of this attempt: torchrun's store outlives a restart, with the addresses of those that ended."""
    store, rank, count = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(backend, store=PrefixStore(f"bisam-attempt-{attempt}", store), rank=rank, world_size=count)


def device_of_rank(device: torch.device) -> torch.device:
    """The GPU of this process among those of its machine."""
    if environment() is None or device.type != "cuda":
        return device
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if number >= torch.cuda.device_count():
        raise ValueError(
            f"this machine has {torch.cuda.device_count()} GPUs, and torchrun has started a process number "
            f"{number + 1}: use --nproc-per-node {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def is_of_collective(error: Exception) -> bool:
    """Whether a collective raised it, since another process has ended."""
    words = ("gloo", "connection closed by peer", "nccl", "connection reset", "broken pipe")
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistBackendError) or any(word in str(error).lower() for word in words)


def unlike_fields(configs: Sequence[Config], options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that all ranks must have alike: those of each run, and the options beside them."""
    found: dict[str, Any] = {"runs": len(configs), **options}
    for number, config in enumerate(configs):
        for name, value in config.as_dict().items():
            found[name if len(configs) == 1 else f"{name} of run {number}"] = value
    return found
