"""AdamW whose momentum is exchanged instead of gradients, in as little as one bit a value.

    model = DDP(model, codec="onebit(block=256)")        # or fully_shard_with(model, mesh, codec="onebit(block=256)")
    optimizer = CompressedAdamW(model.parameters(), lr=1e-3, ddp=model, warmup_steps=300)

Adam divides by the root of a second moment v that it learns from gradients. A coarse codec's error goes into v as if
it were gradient: v grows, most where gradients are small, and training slows down or stops. 1-bit Adam (Tang et al.,
2021) takes v out of that loop. While warming up, gradients travel by a codec that is safe for Adam, and both moments
follow. Then v stays what it was, and ranks exchange their momentum with error feedback:

    m_i = beta1 m + (1 - beta1) g_i     on each rank, from the m that all ranks have
    m   = average of what the codec makes of m_i + residual_i
    w   = w - lr (m / (1 - beta1^t) / (sqrt(v) + eps) + weight_decay w)

Exact Adam bounds a step after a gradient far above those before, because v follows it; a frozen v does not. A word that
was rare while warming up would throw its row, and the scales of the blocks that it is encoded in. So a rank's gradient
counts up to LIMIT sqrt(ranks) of the frozen root, element by element. And v must be in the units of what is exchanged
afterwards: gradients that the user clips while warming up count into it as they came, before clipping.

The exchange calls `Moments` around each compressed bucket, so plans, overlap and error feedback are the wrapper's.
Tensors that always travel dense, by plan or by `dense_below`, keep both moments and the exact step.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.errors import CodecError, naming_extra

with naming_extra():
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.optim.optimizer import ParamsT

from penstock.codecs.registry import SPARSE_CODECS, is_low_rank, make_codec
from penstock.codecs.spec import parse_spec
from penstock.exchange.compression import AUTO, check_known
from penstock.torch.ddp import DistributedDataParallel
from penstock.torch.fsdp.sharding import ShardedModule

WARMUP_CODEC = "blocks(bits=4)"
COUNT = "exchanged_steps"  # of each group of parameters: steps so far, which warming up counts
SQUARES = "mean_square"  # of a parameter: its squared gradient, averaged over the second half of the warm-up
FROZEN = "is_frozen"  # of a parameter: its second moment stays as it is
FLOOR = 0.01  # a frozen second moment is at least this part of the mean of its block
FLOOR_BLOCK = 256
LIMIT = 5.0  # of a gradient over the frozen root, times the root of the ranks: about what one spike moves exact Adam by
Parts = Sequence[tuple[str, torch.Tensor]]  # gradients of a bucket by name, flat


class CompressedAdamW(torch.optim.AdamW):
    """torch's AdamW for a wrapper with a codec; without `ddp`, or where that has no codec, torch's to the bit.

    Gradients are added up inside of `no_sync` only: after a synchronised pass `grad` holds momentum.
    `clip_grad_norm_` after the backward pass clips gradients while warming up, and momentum after that.

    Args:
        params: Parameters or groups of them, as torch's AdamW takes them.
        lr: The learning rate.
        betas: How slowly the first and the second moment follow gradients.
        eps: What is added to the root of the second moment.
        weight_decay: The part of each weight that a step takes away, times the learning rate.
        ddp: The wrapper, or the module of `fully_shard_with`, whose gradients it steps with. All parameters that it
            averages must be in this optimizer.
        warmup_steps: Steps before momentum is exchanged: 10% to 20% of all, and not fewer than the learning rate rises
            for.
        warmup_codec: What carries gradients until then instead of the wrapper's codec; None: nothing is compressed.
        max_norm: Once momentum is exchanged, each rank's own gradient is clipped to this norm before it goes into its
            momentum; every tensor by itself, to its part of the norm by the second moment, so that buckets wait for no
            others.
        **options: Other arguments of torch's AdamW; with a codec, not `amsgrad`, `maximize`, `fused`,
            `capturable` or `differentiable`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        ddp: DistributedDataParallel | ShardedModule | None = None,
        warmup_steps: int | None = None,
        warmup_codec: str | None = WARMUP_CODEC,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        self._moments: Moments | None = None
        super().__init__(params, lr, betas, eps, weight_decay, **options)
        if ddp is not None and not hasattr(ddp, "exchange_memory"):  # what torch.compile returns has it too
            raise TypeError(
                f"ddp is of type {type(ddp).__qualname__}; wanted the model that penstock.torch's "
                "DistributedDataParallel or fully_shard_with returned"
            )
        if ddp is None or ddp.exchange_memory.compression.codec is None:
            return
        codec = ddp.exchange_memory.compression.codec
        _check(codec, warmup_steps, warmup_codec, max_norm, options)
        if isinstance(ddp, ShardedModule):
            self._check_shards(max_norm)
        assert warmup_steps is not None
        self._moments = Moments(self, ddp, warmup_steps, warmup_codec, max_norm)
        ddp.exchange_memory.moments = self._moments

    def _check_shards(self, max_norm: float | None) -> None:
        """Refuse what momentum of shards cannot be exchanged with."""
        if max_norm is not None:
            raise CodecError(
                "max_norm with shards: a rank knows the norm of its own part only; leave it out, and clip gradients "
                "with torch.nn.utils.clip_grad_norm_ while warming up"
            )
        for each in (parameter for group in self.param_groups for parameter in group["params"]):
            if isinstance(each, DTensor) and each.device.type == "cpu" != each.device_mesh.device_type:
                raise CodecError(
                    "CompressedAdamW with CPU offload: its moments are in host memory, and the gradients that become "
                    "momentum on a GPU; leave the offload policy out, or use torch.optim.AdamW with "
                    "codec='blocks(bits=4)'"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state; torch's own AdamW has counted no steps of ours."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            group.setdefault(COUNT, 0)
        if self._moments is not None:
            self._moments.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step with more parameters."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault(COUNT, self.param_groups[0].get(COUNT, 0))
        if self._moments is not None:
            self._moments.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and that some of them are momentum."""
        super().zero_grad(set_to_none)
        if self._moments is not None:
            self._moments.arrived.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step: AdamW's own where gradients arrived, with the frozen second moment where momentum did."""
        if self._moments is None:
            exact: float | None = super().step(closure)
            return exact
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moments = self._moments
        arrived, moments.arrived = moments.arrived, set()
        kept = {p: p.grad for p in moments.frozen() if p.grad is not None}
        for parameter in kept:
            parameter.grad = None  # torch's step leaves those alone
        moments.note_gradients()
        super().step()
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        for group in self.param_groups:
            _step_frozen(moments, group, [p for p in group["params"] if p in kept], arrived)
            group[COUNT] += 1
        if moments.steps == moments.warmup_steps:
            moments.begin()
        elif moments.steps == moments.warmup_steps + 1:
            moments.forget_squares()
        return loss


class Moments:
    """What the exchange asks of the optimizer: which codec, and momentum in the place of gradients."""

    def __init__(
        self,
        optimizer: CompressedAdamW,
        ddp: DistributedDataParallel | ShardedModule,
        warmup_steps: int,
        warmup_codec: str | None,
        max_norm: float | None,
    ) -> None:
        self.warmup_steps, self._warmup_codec, self._max_norm = warmup_steps, warmup_codec, max_norm
        self.arrived: set[torch.Tensor] = set()  # parameters whose `grad` is momentum since the last step
        self._optimizer, self._memory = optimizer, ddp.exchange_memory
        self._parameters, group, may_lack = _averaged_by(ddp)
        self._groups: dict[torch.Tensor, dict[str, Any]] = {}  # the optimizer's, by parameter
        self._roots: dict[torch.Tensor, torch.Tensor] = {}  # sqrt(v) + eps of parameters whose v is frozen
        self._limits: dict[torch.Tensor, torch.Tensor] = {}  # norms that their gradients are clipped to
        self._largest = LIMIT * math.sqrt(dist.get_world_size(group))
        self._came: dict[torch.Tensor, torch.Tensor] = {}  # norms of gradients as they came, before the user clips
        self.forget()
        if left := [name for name, each in self._parameters.items() if each not in self._groups]:
            raise CodecError(
                f"CompressedAdamW does not have parameter {left[0]!r}, which its wrapper averages by the same codec; "
                "give it all parameters that are trained, or freeze those before wrapping"
            )
        if may_lack:
            raise CodecError(
                "CompressedAdamW with find_unused_parameters=True: a parameter without a gradient would lose what its "
                "momentum owes; use torch.optim.AdamW with codec='blocks(bits=4)'"
            )

    @property
    def steps(self) -> int:
        """Steps that the optimizer has taken."""
        return int(self._optimizer.param_groups[0][COUNT])

    @property
    def is_warming_up(self) -> bool:
        """Whether gradients are exchanged still."""
        return self.steps < self.warmup_steps

    def codec(self, spec: str) -> str | None:
        """Return what a bucket travels by in this iteration whose plan says `spec`; None: dense."""
        return self._warmup_codec if self.is_warming_up else spec

    def before(self, gradients: Parts, loss_scale: float) -> None:
        """Turn this rank's gradients, scaled with the loss, into its momentum over the root of the second moment."""
        if self.is_warming_up:
            return
        if again := [name for name, _ in gradients if self._parameters[name] in self.arrived]:
            raise CodecError(
                f"two synchronised backward passes before a step: `grad` of {again[0]!r} already holds momentum; "
                "add gradients up inside of model.no_sync(), and call optimizer.zero_grad() after a step"
            )
        for group, parameters, parts in self._by_group(gradients):
            self.arrived.update(parameters)
            roots = [self.root(each) for each in parameters]
            self._clip(parameters, parts, loss_scale)
            beta1 = group["betas"][0]
            torch._foreach_div_(parts, roots)
            _bound(parts, self._largest * loss_scale)
            torch._foreach_mul_(parts, 1 - beta1)
            moments = [_flat(self.state(each)["exp_avg"]) for each in parameters]
            torch._foreach_addcdiv_(parts, moments, roots, value=beta1 * loss_scale)

    def after(self, averages: Parts) -> None:
        """Turn what came of the exchange into momentum again; of gradients note how long they were."""
        if self.is_warming_up:
            if self._is_noting and averages:
                norms = torch._foreach_norm([part for _, part in averages])
                self._came.update(zip((self._parameters[name] for name, _ in averages), norms, strict=True))
            return
        for _, parameters, parts in self._by_group(averages):
            torch._foreach_mul_(parts, [self.root(each) for each in parameters])

    @property
    def _is_noting(self) -> bool:
        """Whether this step's gradients count into the second moment that will be frozen."""
        return self.warmup_steps // 2 <= self.steps < self.warmup_steps

    def note_gradients(self) -> None:
        """Add this step's gradients to the mean squares, in the second half of the warm-up."""
        if not self._is_noting:
            return
        found = [each for each in self._groups if each.grad is not None]
        for each in found:
            if SQUARES not in self.state(each):
                self.state(each)[SQUARES] = self._squares_so_far(each)
        if found:
            gradients = [_here(each.grad) for each in found if each.grad is not None]
            if self._came:
                gradients = list(torch._foreach_mul(gradients, self._clipped_by()))
            squares = [_here(self.state(each)[SQUARES]) for each in found]
            count = self.warmup_steps - self.warmup_steps // 2
            torch._foreach_addcmul_(squares, gradients, gradients, value=1 / count)

    def _squares_so_far(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what mean squares begin with: zeros, unless a checkpoint of torch.distributed left some steps out.

        That loads what a new optimizer has too, and mean squares are not of it: the second moment stands in for them.
        """
        state, half = self.state(parameter), self.warmup_steps // 2
        if self.steps == half or "exp_avg_sq" not in state:
            return torch.zeros_like(parameter, memory_format=torch.preserve_format)
        known = 1 - self._groups[parameter]["betas"][1] ** float(state["step"])
        found: torch.Tensor = state["exp_avg_sq"] * ((self.steps - half) / (self.warmup_steps - half) / known)
        return found

    def _clipped_by(self) -> torch.Tensor:
        """Return how much longer gradients were when they came than they are now, at least 1."""
        now = [_here(each.grad) for each in self._came if each.grad is not None]
        came = [norm for each, norm in self._came.items() if each.grad is not None]
        lengths = [torch.linalg.vector_norm(torch.stack(each)) for each in (came, torch._foreach_norm(now))]
        self._came = {}
        longer: torch.Tensor = lengths[0] / self._memory.loss_scale / lengths[1].clamp_min(1e-30)
        return longer.clamp_min(1.0)

    def begin(self) -> None:
        """Forget the residuals of gradients: from now on momentum is exchanged, in other units."""
        self._memory.residuals.multiply(0.0)

    def forget_squares(self) -> None:
        """Forget mean squares of what travels dense, or has no element here: all ranks keep state of the same names."""
        for each in self._groups:
            self.state(each).pop(SQUARES, None)

    def forget(self) -> None:
        """Forget what was computed from the optimizer's state, which is another one now."""
        self._groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        self._roots, self._limits, self._came = {}, {}, {}

    def frozen(self) -> list[torch.Tensor]:
        """Return parameters whose second moment stays as it is."""
        return [each for each in self._groups if self._optimizer.state[each].get(FROZEN)]

    def state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return what the optimizer keeps of a parameter."""
        state: dict[str, Any] = self._optimizer.state[parameter]
        return state

    def _by_group(self, parts: Parts) -> Iterable[tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]]:
        """Return gradients by the optimizer's groups, each with its parameter."""
        for group in self._optimizer.param_groups:
            found = [(self._parameters[name], part) for name, part in parts]
            here = [(parameter, part) for parameter, part in found if self._groups[parameter] is group]
            if here:
                yield group, [parameter for parameter, _ in here], [part for _, part in here]

    def root(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return sqrt(v) + eps of a parameter, flat; its second moment is frozen from the first time on."""
        if parameter not in self._roots:
            state = self.state(parameter)
            if not state.get(FROZEN):
                squares = _here(state.pop(SQUARES, state["exp_avg_sq"]))
                if squares.is_cuda:  # made on the optimizer's stream, read on a bucket's
                    squares.record_stream(torch.cuda.current_stream(squares.device))
                _here(state["exp_avg_sq"]).copy_(_with_floor(squares))
                state[FROZEN] = True
            self._roots[parameter] = _flat(state["exp_avg_sq"]).sqrt().add_(self._groups[parameter]["eps"])
        return self._roots[parameter]

    def _clip(self, parameters: list[torch.Tensor], parts: list[torch.Tensor], loss_scale: float) -> None:
        if self._max_norm is None:
            return
        if not self._limits:
            self._limits = self._shares()
            if parts[0].is_cuda:  # once: buckets on other streams read them too
                torch.cuda.current_stream(parts[0].device).synchronize()
        norms = torch.stack(torch._foreach_norm(parts)) / loss_scale
        factors = torch.stack([self._limits[each] for each in parameters]) / norms.clamp_min(1e-30)
        torch._foreach_mul_(parts, list(factors.clamp_max_(1.0).unbind()))

    def _shares(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return each parameter's part of the norm that gradients are clipped to; by size where no moment is known."""
        assert self._max_norm is not None
        states = {each: self.state(each) for each in self._parameters.values()}
        squares = {each: state.get(SQUARES, state["exp_avg_sq"]).float().sum() for each, state in states.items()}
        whole, numel = torch.stack(list(squares.values())).sum(), sum(each.numel() for each in squares)
        shares = {
            each: torch.where(whole > 0, square / whole, each.numel() / numel) for each, square in squares.items()
        }
        return {each: self._max_norm * share.sqrt() for each, share in shares.items()}


def _step_frozen(
    moments: Moments, group: dict[str, Any], parameters: list[torch.Tensor], arrived: set[torch.Tensor]
) -> None:
    """Step by momentum and a frozen second moment; `grad` is momentum where that `arrived`, elsewhere a gradient."""
    if not parameters:
        return
    beta1, rate = group["betas"][0], float(group["lr"])
    states = [moments.state(each) for each in parameters]
    averages, weights = [_here(state["exp_avg"]) for state in states], [_here(each) for each in parameters]
    for average, parameter in zip(averages, parameters, strict=True):
        assert parameter.grad is not None
        if parameter in arrived:
            average.copy_(_here(parameter.grad))
        else:  # it travelled dense, as while a plan is made
            average.lerp_(_here(parameter.grad), 1 - beta1)
    for state in states:
        state["step"] += 1
    roots = [
        moments.root(each).as_strided(here.shape, here.stride()) for each, here in zip(parameters, weights, strict=True)
    ]
    torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
    torch._foreach_addcdiv_(
        weights, averages, roots, scalars=[-rate / (1 - beta1 ** float(state["step"])) for state in states]
    )


def _bound(parts: list[torch.Tensor], largest: float) -> None:
    """Bound all elements; one that is not finite becomes NaN, which every rank is told of."""
    over = torch._foreach_abs(parts)
    torch._foreach_div_(over, largest)
    torch._foreach_clamp_min_(over, 1.0)
    torch._foreach_div_(parts, over)


def _with_floor(squares: torch.Tensor) -> torch.Tensor:
    """Return mean squares with none far below those around it: a step divides by their root for ever after."""
    flat = _flat(squares)
    whole = len(flat) // FLOOR_BLOCK * FLOOR_BLOCK
    means = [flat[:whole].view(-1, FLOOR_BLOCK).mean(1).repeat_interleave(FLOOR_BLOCK)]
    if whole < len(flat):
        means.append(flat[whole:].mean().expand(len(flat) - whole))
    mean = torch.cat(means)
    return torch.maximum(flat, FLOOR * mean).as_strided(squares.shape, squares.stride())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory in order, as buckets hold gradients: dense, in whatever order its dimensions are."""
    here = _here(tensor)
    return here.as_strided((here.numel(),), (1,))


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _averaged_by(
    ddp: DistributedDataParallel | ShardedModule,
) -> tuple[dict[str, torch.nn.Parameter], dist.ProcessGroup, bool]:
    """Return the parameters whose gradients are averaged, over which ranks, and whether some may lack one.

    One that is frozen for now is among those of `DistributedDataParallel`.
    """
    if isinstance(ddp, DistributedDataParallel):
        found = {each.name: each.parameter for each in ddp._planning.buckets.parameters}
        return found, ddp.process_group, bool(ddp.find_unused_parameters)
    assert isinstance(ddp, torch.nn.Module), "fully_shard_with makes modules"
    return {name: each for name, each in ddp.named_parameters() if each.requires_grad}, ddp.replica_group, False


def _check(codec: str, warmup_steps: object, warmup_codec: object, max_norm: object, options: dict[str, Any]) -> None:
    """Refuse what momentum cannot be exchanged with."""
    if not isinstance(warmup_steps, int) or warmup_steps < 2:
        raise CodecError(f"warmup_steps is {warmup_steps!r}; wanted 2 or more, such as a fifth of all steps")
    if warmup_codec is not None:
        if not isinstance(warmup_codec, str) or warmup_codec == AUTO:
            raise CodecError(f"warmup_codec is {warmup_codec!r}; wanted one such as {WARMUP_CODEC!r}, or None")
        check_known(warmup_codec)
        make_codec(warmup_codec)
    for spec in (codec, warmup_codec):
        if spec not in (None, AUTO) and parse_spec(str(spec))[0] in SPARSE_CODECS:
            raise CodecError(f"CompressedAdamW with codec {spec!r}, which sends few entries; wanted onebit or blocks")
        if spec is not None and is_low_rank(str(spec)):
            raise CodecError(f"CompressedAdamW with codec {spec!r}, which factors gradients; wanted onebit or blocks")
    if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
        raise CodecError(f"max_norm is {max_norm!r}; wanted more than 0, or None")
    for name in ("amsgrad", "maximize", "fused", "capturable", "differentiable"):
        if options.get(name):
            raise CodecError(f"CompressedAdamW with {name}=True and a codec; leave one of the two out")
