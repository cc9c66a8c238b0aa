"""Programs whose data never leave the device: NCCL moves them, and the device adds.

Messages of a round go to NCCL as one group (`batch_isend_irecv`), on one stream; sums run on another and wait only for
their own messages, so that the next round travels meanwhile. The host issues everything and waits for nothing. torch
adds float16 and bfloat16 in float32 and rounds to nearest even, as the host's kernels do, and the order of summation
is the program's: results have the same bits as on the host (a NaN may have another payload).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from penstock.errors import StrategyError
from penstock.program import DATA, Collective, Op, Program, Slice
from penstock.runtime.device.rounds import Round, rounds

Message = tuple[bool, torch.Tensor, int]  # whether it is sent, its memory, and the other rank


class Engine(Protocol):
    """What moves data between devices, in the order of the current stream."""

    def exchange(self, messages: Sequence[Message]) -> None:
        """Start all messages together; what follows on the current stream finds them arrived."""

    def collective(self, collective: Collective, tensor: torch.Tensor, root: int) -> None:
        """Run the engine's own collective."""


class Direct:
    """One rank's part of a program on a device, ready to run any number of times."""

    def __init__(self, program: Program, rank: int, dtype: str, digest: str, engine: Engine) -> None:
        if any(buffer.encoded for buffer in program.buffers):
            raise StrategyError(f"{program.strategy}: encoded messages over NCCL; codecs run where gloo or MPI do")
        self.part = program.part(rank)
        self.program, self.dtype, self.numel, self.digest = program, dtype, program.numel, digest
        self.instructions, self._engine = program.ranks[rank], engine
        self._native = any(instruction.op is Op.NATIVE for instruction in self.instructions)
        self._rounds: tuple[Round, ...] = () if self._native else rounds(program)[rank]
        self._lane: _Lane | None = None  # of the device that was used last

    def run(
        self,
        data: Any,
        call: int = 0,
        timeout_seconds: float = 0.0,
        recorder: Any = None,
        staged: Any = None,
        residual: Any = None,
        scale: float = 1.0,
    ) -> None:
        """Issue the whole program for a contiguous tensor; the current stream waits for its end, the host does not.

        The other arguments are those of `Prepared.run`; the host sees nothing that it could number, stop or record.
        """
        tensor, caller = data.detach().view(-1), torch.cuda.current_stream(data.device)
        if self._lane is None or self._lane.device != data.device:
            self._lane = _Lane(data.device, {one.name: one.numel for one in self.program.buffers}, data.dtype)
        lane = self._lane
        if self._native and tensor.numel():
            self._engine.collective(self.program.collective, tensor, self.program.root)
        for stream in (lane.moving, lane.adding):
            stream.wait_stream(caller)
        for one in self._rounds:
            self._exchange(one, lane, tensor)
            lane.adding.wait_stream(lane.moving)
            for index in one.computations:
                self._compute(index, lane, tensor)
        for stream in (lane.moving, lane.adding):
            caller.wait_stream(stream)

    def _exchange(self, one: Round, lane: "_Lane", data: torch.Tensor) -> None:
        for index in one.messages:
            for earlier in self.instructions[index].after:
                if earlier in lane.added:
                    lane.moving.wait_event(lane.added[earlier])
        if one.messages:
            with torch.cuda.stream(lane.moving):
                self._engine.exchange([self._message(index, lane, data) for index in one.messages])

    def _message(self, index: int, lane: "_Lane", data: torch.Tensor) -> Message:
        instruction = self.instructions[index]
        sent = instruction.op is Op.SEND
        assert instruction.peer is not None
        memory = lane.memory(instruction.read if sent else instruction.write, data)
        return sent, memory.view(torch.uint8), instruction.peer

    def _compute(self, index: int, lane: "_Lane", data: torch.Tensor) -> None:
        instruction = self.instructions[index]
        out, other = lane.memory(instruction.write, data), lane.memory(instruction.read, data)
        with torch.cuda.stream(lane.adding):
            (out.add_ if instruction.op is Op.MERGE else out.copy_)(other)
            lane.added.setdefault(index, torch.cuda.Event()).record(lane.adding)  # type: ignore[no-untyped-call]


class _Lane:
    """What a program uses on one device: two streams, scratch memory, and an event per computation, used again."""

    def __init__(self, device: torch.device, buffers: dict[str, int], dtype: torch.dtype) -> None:
        self.device = device
        self.moving, self.adding = _stream(device), _stream(device)
        self.scratch = {name: torch.empty(numel, dtype=dtype, device=device) for name, numel in buffers.items()}
        self.added: dict[int, torch.cuda.Event] = {}

    def memory(self, slice_: Slice | None, data: torch.Tensor) -> torch.Tensor:
        assert slice_ is not None
        return (data if slice_.buffer == DATA else self.scratch[slice_.buffer])[slice_.start : slice_.stop]


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
