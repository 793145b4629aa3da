"""What staged gradients answer through the handles in `.grad`: norms, scaling, a further backward pass, the plain gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from stallfree.engine.blocks import describe
from stallfree.engine.gradient import Staged

if TYPE_CHECKING:
    from stallfree.engine.pipeline import Engine

VERSION_OF_A_NUMBER = -1  # no tensor has it


class Handles:
    """The `Owner` of one engine's staged gradients."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.zeroed = False  # some handle has been, since the last call
        self._scaling: tuple[Tensor | None, Tensor | float, int | None, Tensor] | None = None  # the last product of `scaled`

    def after_call(self) -> None:
        """Handles of the next call begin anew."""
        self.zeroed, self._scaling = False, None

    def cleared(self) -> None:
        self.zeroed = True

    def check_current(self, staged: Staged) -> None:
        """Refuse a handle whose gradient is no longer there."""
        state = self.engine.weights[staged.weight.param]
        if state.weight is staged.weight and (state.staged is staged or staged.zero) and not self.engine.closed:
            return
        name = describe(staged.weight.name, staged.weight.param)
        what = "applied by step() already" if staged.consumed else "discarded by zero_grad(), load_state_dict() or close()"
        raise RuntimeError(
            f"the gradient of {name} was {what}: call zero_grad(), then backward; to keep a gradient, keep "
            "optimizer.full_gradient(param)"
        )

    def norm(self, staged: Staged) -> Tensor:
        state = self.engine.weights[staged.weight.param]
        just_applied = state.staged is None and staged.consumed and staged.call.number == self.engine.clock.call
        if not just_applied:  # until the next backward pass the norm is still there
            self.check_current(staged)
        return self.engine.channels.norm(staged.weight)

    @torch.no_grad()
    def scaled(self, factor: Tensor | None, by: Tensor | float) -> Tensor:
        """The product. Clipping multiplies all gradients by the same number, as pipelining does: it is done once in a call.

        In the next one a tensor may be another number, though its version is the same: a CUDA graph writes it, say.
        """
        last = self._scaling if self._scaling is not None and self._scaling[0] is factor else None
        if isinstance(by, Tensor):
            version = None if by.is_inference() else by._version
            if version is not None and last is not None and last[1] is by and last[2] == version:
                return last[3]
            number = torch.as_tensor(by, dtype=torch.float32, device=self.engine.device).reshape(())
            product = number.clone() if factor is None else factor * number
        else:
            version = VERSION_OF_A_NUMBER
            if last is not None and last[2] == version and last[1] == by:
                return last[3]
            rounded = torch.as_tensor(by, dtype=torch.float32, device="cpu").item()  # inf, if it is too large
            # Not a copy of it, which would wait for the device.
            product = torch.full((), rounded, dtype=torch.float32, device=self.engine.device)
            if factor is not None:
                product *= factor
        self._scaling = (factor, by, version, product)
        return product

    def check_scalable(self, staged: Staged) -> None:
        self.check_current(staged)
        if self.engine.config.update_in_backward:
            self.refuse_change(staged)

    def refuse_change(self, staged: Staged) -> NoReturn:
        raise RuntimeError(
            f"the gradient of {staged.weight.name} cannot be changed: update_in_backward (preset stronghold) starts "
            "its update during backward. Clipping, scaling and a varying number of backward passes need preset zero-offload"
        )

    def restage(self, staged: Staged, grad: Tensor | float, alpha: float) -> None:
        """Another backward pass adds to a staged gradient, in the gradient's dtype, as `.grad += grad` would."""
        with self.engine.lock, self.engine.link.device_guard():
            self._restage(staged, grad, alpha)

    def _restage(self, staged: Staged, grad: Tensor | float, alpha: float) -> None:
        engine = self.engine
        self.check_current(staged)
        state = engine.weights[staged.weight.param]
        if state.early:
            self.refuse_change(staged)
        engine.meter.restages += not staged.zero
        state.block.surprised = True
        total = self.full_gradient(staged).add_(grad, alpha=alpha)
        block = state.block
        grads: list[Tensor | None] = [None] * len(block.weights)
        grads[state.place] = total
        engine.sending.send(block, [state.place], grads)
        staged.factor, staged.zero, staged.call = None, False, block.staged_call(engine.clock.call + 1)
        block.staged[state.place] = staged

    def full_gradient(self, staged: Staged) -> Tensor:
        """The plain gradient of a handle: a device tensor of the shard's shape. Waits for its copy."""
        with self.engine.lock, self.engine.link.device_guard():
            return self._full_gradient(staged)

    def _full_gradient(self, staged: Staged) -> Tensor:
        state = self.engine.weights[staged.weight.param]
        if staged.zero:
            return torch.zeros_like(staged.weight.shard)
        self.check_current(staged)
        if state.early:
            raise RuntimeError(f"the gradient of {staged.weight.name} was applied already; read it between backward and step()")
        block, place = state.block, state.place
        division, layout = block.half.division, block.half.division.layout
        full = torch.empty_like(staged.weight.shard, memory_format=torch.contiguous_format)
        rows = staged.weight.rows_of(full)
        rows.index_copy_(0, division.selected[place], layout.selected_rows(block.half.gradient, place))
        link = self.engine.link
        self.engine.sending.finish()
        link.wait_down()
        for low, piece in block.half.pieces(layout, block.take_slot()):
            held = layout.rows_between(place, low, low + piece.numel())
            channels = division.deferred[place][held.start : held.stop]
            rows.index_copy_(0, channels, link.to_device(layout.deferred_rows(piece, place, low)))
        return full if staged.factor is None else full.mul_(staged.factor)
