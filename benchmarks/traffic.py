"""Bytes that a process sends: as handed to the collectives of torch.distributed, and as its sockets have sent them."""

import os
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BYTES_ACKNOWLEDGED = 120
"""Offset of tcpi_bytes_acked in Linux's struct tcp_info."""


class Collectives(TorchDispatchMode):
    """Counts calls and bytes of collectives while it is entered.

    Every collective is an operation of the dispatcher's namespace `c10d`, also those that DistributedDataParallel
    starts from C++ inside of a backward pass. The bytes of one are those of its largest argument: the tensor that is
    reduced, broadcast, gathered into or scattered from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and function._opname not in ("barrier", "monitored_barrier_"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.calls[function._opname] += 1
            self.bytes[function._opname] += max((tensor.nbytes for tensor in tensors), default=0)
        return function(*args, **(kwargs or {}))

    def sent(self, ranks: int) -> float:
        """What a rank sends by the usual algorithms, a ring: a mean over the ranks."""
        parts = {"allreduce_": 2.0, "_allgather_base_": 1.0, "_reduce_scatter_base_": 1.0, "broadcast_": 1.0}
        unknown = self.bytes.keys() - parts.keys()
        if unknown:
            raise ValueError(f"no rule for the bytes of {', '.join(sorted(unknown))}")
        return sum(parts[name] * count for name, count in self.bytes.items()) * (ranks - 1) / ranks


def on_the_wire() -> int:
    """Bytes that the TCP sockets of this process have sent since they were opened, and that have arrived.

    Gloo sends over TCP, on one machine too. Call a barrier before: what has not arrived does not count.
    """
    return sum(map(_acknowledged, _sockets()))


def _sockets() -> Iterator[socket.socket]:
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as found:
                    yield found


def _acknowledged(found: socket.socket) -> int:
    if found.type != socket.SOCK_STREAM or found.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    try:
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # one that listens, or is closed
        return 0
    return struct.unpack_from("<Q", info, BYTES_ACKNOWLEDGED)[0]
