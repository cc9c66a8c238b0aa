"""Hugging Face's Accelerate with our wrapper.

    from penstock.integrations.accelerate import Accelerator   # was: from accelerate import Accelerator
    accelerator = Accelerator(codec="blocks(bits=4)")

`prepare` places the model, sets up autocast and compiles it as Accelerate does, and wraps it in our
`DistributedDataParallel` where Accelerate would take torch's. `save_state` and `load_state` hold weights, optimizer and
what the exchange keeps. One process, FSDP, DeepSpeed and tensor parallelism are left to Accelerate.
"""

from functools import partial
from types import MethodType
from typing import Any

from penstock.errors import PlanError, naming_extra

with naming_extra():
    import torch
    from accelerate import Accelerator as HuggingFaceAccelerator
    from accelerate.utils import DistributedType, DynamoBackend, compile_regions
    from torch import nn

from penstock.integrations.exchange_files import FOLDER, load_exchange, save_exchange, wrapper_in
from penstock.torch.ddp import DistributedDataParallel

WRAPPED_BY_TORCH = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)  # where Accelerate takes stock DDP


class Accelerator(HuggingFaceAccelerator):  # type: ignore[misc]  # Accelerate has no types
    """Accelerate's class, which wraps models in `penstock.torch.DistributedDataParallel`.

    Args:
        *arguments: Accelerate's own, by position.
        codec: Short for `wrapper_options={"codec": ...}`.
        wrapper_options: Options of our wrapper. Arguments of stock DDP go through Accelerate's
            `DistributedDataParallelKwargs`, as before.
        **options: Accelerate's own.
    """

    def __init__(
        self, *arguments: Any, codec: Any = None, wrapper_options: dict[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        use_penstock(self, **({} if codec is None else {"codec": codec}), **(wrapper_options or {}))


def use_penstock(accelerator: HuggingFaceAccelerator, **wrapper_options: Any) -> None:
    """Have an accelerator that exists wrap models in our DistributedDataParallel, and save what that keeps.

    For accelerators that another library makes; call it before `prepare`.

    Args:
        accelerator: The accelerator.
        **wrapper_options: Options of `penstock.torch.DistributedDataParallel`.
    """
    prepare = accelerator.prepare_model
    accelerator.prepare_model = MethodType(partial(_prepare_model, prepare, wrapper_options), accelerator)
    wrapped = accelerator.penstock_wrappers = []
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: _save(wrapped, folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: _load(wrapped, folder))


def _prepare_model(
    prepare: Any,
    wrapper_options: dict[str, Any],
    accelerator: Any,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    """Do what Accelerate's `prepare_model` does, with our wrapper in the place of torch's."""
    if evaluation_mode or wrapper_in(model) is not None or not _wraps(accelerator, model):
        return prepare(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]
    dynamo = accelerator.state.dynamo_plugin
    backend, dynamo.backend = dynamo.backend, DynamoBackend.NO  # the wrapper is compiled, not what is in it
    try:
        model = prepare(model, device_placement, evaluation_mode=True)  # device and autocast
    finally:
        dynamo.backend = backend
    wrapper = _wrap(accelerator, model, wrapper_options)
    accelerator.penstock_wrappers.append(wrapper)
    prepared: Any = wrapper
    if backend != DynamoBackend.NO:
        compiled = compile_regions if dynamo.use_regional_compilation else torch.compile
        prepared = compiled(wrapper, **dynamo.to_kwargs())
    prepared._is_accelerate_prepared = True
    return prepared  # type: ignore[no-any-return]


def _wraps(accelerator: Any, model: nn.Module) -> bool:
    """Return whether Accelerate would wrap this model in stock DDP."""
    parallelism = accelerator.parallelism_config
    trains = any(parameter.requires_grad for parameter in model.parameters())
    return accelerator.distributed_type in WRAPPED_BY_TORCH and trains and not (parallelism and parallelism.tp_enabled)


def _wrap(accelerator: Any, model: nn.Module, wrapper_options: dict[str, Any]) -> DistributedDataParallel:
    """Return the model in our wrapper, with what the user told Accelerate about stock DDP."""
    handler, on_gpu = accelerator.ddp_handler, accelerator.distributed_type == DistributedType.MULTI_GPU
    options: dict[str, Any] = {"device_ids": [accelerator.local_process_index]} if on_gpu else {}
    options |= handler.to_kwargs() if handler is not None else {}
    if accelerator.scaler is not None and {"codec", "compression"} & set(wrapper_options):
        options["grad_scaler"] = accelerator.scaler
    if repeated := sorted(set(options) & set(wrapper_options)):
        raise PlanError(
            f"{repeated[0]} is given to Accelerate's DistributedDataParallelKwargs and in wrapper_options; wanted one"
        )
    wrapper = DistributedDataParallel(model, **options, **wrapper_options)
    if handler is not None:
        handler.register_comm_hook(wrapper)
    return wrapper


def _folder(number: int) -> str:
    return FOLDER if number == 0 else f"{FOLDER}-{number}"  # as Accelerate numbers models


def _save(wrappers: list[DistributedDataParallel], folder: str) -> None:
    for number, wrapper in enumerate(wrappers):
        save_exchange(wrapper, folder, _folder(number))


def _load(wrappers: list[DistributedDataParallel], folder: str) -> None:
    for number, wrapper in enumerate(wrappers):
        load_exchange(wrapper, folder, _folder(number))
