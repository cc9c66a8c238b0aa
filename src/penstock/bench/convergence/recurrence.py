"""An LSTM of many runs at once, with a weight gradient for each worker, and the table of its words."""

from typing import Any

import torch
from torch.autograd import Function

from penstock.bench.convergence.layers import product
from penstock.bench.convergence.triton_cell import cell, cell_back


class Recurrence(Function):
    """What one layer of an LSTM makes of [run, worker, sequence, place, 4 x width], its inputs' part of the gates."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the outputs [run, worker, sequence, place, width]; weights are [run, worker, 4 x width, width]."""
        width, runs = weights.shape[-1], len(given)
        flat = given.flatten(0, 2)
        shared = weights[:, 0].to(given.dtype)
        h = torch.zeros((len(flat), width), device=given.device, dtype=given.dtype)
        c = torch.zeros((len(flat), width), device=given.device)
        outputs, states, cells = [h], [], [c]
        for place in range(flat.shape[1]):
            hidden = product(outputs[-1].unflatten(0, (runs, -1)), shared.transpose(1, 2)).flatten(0, 1)
            gates, c, h = cell(flat[:, place], hidden, c)
            outputs.append(h)
            states.append(gates)
            cells.append(c)
        ctx.save_for_backward(shared, *outputs[:-1], *states, *cells)
        ctx.head = given.shape[:3]
        y: torch.Tensor = torch.stack(outputs[1:], 1).unflatten(0, ctx.head)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gradients of the gates' given part and of every worker's weights."""
        shared, *saved = ctx.saved_tensors
        flat, places = dy.contiguous().flatten(0, 2), dy.shape[3]
        outputs, states, cells = saved[:places], saved[places : 2 * places], saved[2 * places :]
        carried = torch.zeros_like(cells[0])
        dc, slopes = torch.zeros_like(carried), []
        for place in reversed(range(places)):
            slopes.append(cell_back(flat[:, place], carried, dc, cells[place], cells[place + 1], states[place]))
            carried = product(slopes[-1].unflatten(0, (len(dy), -1)), shared).flatten(0, 1)
        dgates = torch.stack(slopes[::-1], 1)
        workers = (ctx.head[0] * ctx.head[1], -1)
        left = dgates.unflatten(0, workers).flatten(1, 2).transpose(1, 2)
        right = torch.stack(outputs, 1).unflatten(0, workers).flatten(1, 2)
        return dgates.unflatten(0, ctx.head), product(left, right).unflatten(0, ctx.head[:2])


class Table(Function):
    """Rows of a run's own table [run, worker, word, width], chosen by numbers [run, worker, ...]."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows in `dtype`."""
        run = torch.arange(len(table), device=table.device).view(-1, *[1] * (numbers.dim() - 1))
        ctx.save_for_backward(numbers)
        ctx.shape = table.shape
        return table[:, 0][run, numbers].to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        """Return every worker's gradient of the table: the sum of each word's places."""
        (numbers,) = ctx.saved_tensors
        runs, workers, words, width = ctx.shape
        worker = torch.arange(runs * workers, device=dy.device).view(runs, workers, *[1] * (numbers.dim() - 2))
        total = torch.zeros((runs * workers * words, width), device=dy.device)
        total.index_add_(0, (worker * words + numbers).flatten(), dy.reshape(-1, width).float())
        return None, total.view(ctx.shape), None
