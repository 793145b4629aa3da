"""ZenFlowAdamW: the optimizer people hold. It reads param_groups and speaks torch's protocol; the engine does the work."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from stallfree import limits, planner
from stallfree.config import ZenFlowConfig
from stallfree.engine import checkpoint, joining, state, weights
from stallfree.engine.blocks import check_distinct, check_trainable
from stallfree.engine.gradient import StagedGradient
from stallfree.engine.interval import IntervalChange
from stallfree.engine.pipeline import Engine
from stallfree.engine.settings import Settings, hyper_of, read_settings
from stallfree.engine.sharding import Agreement, RankSums, gradient_of, groups_of, shard_of, whole
from stallfree.engine.uninterrupted import NOWHERE
from stallfree.ignored import warn_of_ignored
from stallfree.telemetry.meter import mean_by_kind


class ZenFlowAdamW(torch.optim.Optimizer):
    """AdamW whose state lives in host memory, updated beside training.

    Important channels of each weight are updated on the device at every step; the others on the host, each gradient with its
    own AdamW step, visible at most `S + lag - 1` steps late (ZenFlow, arXiv 2505.12242; docs/update-rule.md). S is
    `update_interval`; by default that is "auto", which begins with 2 and asks for `max_update_interval` (8) at most.

    Args:
        params: parameters, named parameters (recommended: names tell embeddings from linear weights) or param groups.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; per group, read at every step, so that any scheduler works.
        config: settings; or pass them as keywords (`ZenFlowAdamW(params, preset="zero-offload")`). Keywords win.

    Raises:
        ValueError, TypeError: for settings or parameters it cannot train, before anything is allocated.
        MemoryError: if the host state does not fit, with a table of what it needs.

    >>> model = nn.Linear(8, 8)
    >>> optimizer = ZenFlowAdamW(model.named_parameters(), lr=1e-3)
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.flush()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        config: ZenFlowConfig | None = None,
        **overrides: Any,
    ) -> None:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("build the optimizer outside of torch.inference_mode(): what is made inside cannot be trained")
        if config is None:
            config = ZenFlowConfig.from_dict(overrides)
        elif not isinstance(config, ZenFlowConfig):
            raise TypeError(
                f"config must be a ZenFlowConfig, not {type(config).__name__}; for a dict: ZenFlowConfig.from_dict(...)"
            )
        elif overrides:
            config = config.replace(**overrides)
        self.config, self._room_is_open = config, config.room_is_open
        self._engine: Engine | None = None
        groups = _as_groups(params)
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        named = self._named(self.param_groups)
        if not named:
            raise ValueError(
                "all parameters are frozen (requires_grad is False): unfreeze what is to learn before the optimizer is built"
            )
        joining.check_ranks(named)
        check_trainable(named)
        warn_of_ignored(config, [name for name, _ in self._named(self.param_groups, frozen=True)], stacklevel=3)
        self.config = _agreed(named, planner.with_room(named, config))
        self._engine = self._new_engine(shard_of(named[0][1]).device)
        try:
            joining.adopt(self._engine, named)
        except BaseException:
            self._engine.close()
            raise
        state.populate(self._engine, self.state)

    def _new_engine(self, device: torch.device) -> Engine:
        this = weakref.ref(self)

        def settings() -> Settings:
            optimizer = this()
            assert optimizer is not None, "the engine outlived its optimizer"
            return read_settings(optimizer.param_groups)

        def read_params() -> list[nn.Parameter]:
            optimizer = this()
            assert optimizer is not None, "the engine outlived its optimizer"
            return [param for group in optimizer.param_groups for param in group["params"]]

        def read_name(param: nn.Parameter) -> str:
            optimizer = this()
            assert optimizer is not None, "the engine outlived its optimizer"
            return next(name for name, member in optimizer._named(optimizer.param_groups, frozen=True) if member is param)

        engine = Engine(device, self.config, settings, read_params, read_name)
        self._finalizer = weakref.finalize(self, engine.close)
        return engine

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    # torch's protocol

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One call of the update rule on the gradients in `.grad`. Returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.engine.uninterrupted():
            known = len(self.engine.ledger.ids)
            self.engine.step()
            if len(self.engine.ledger.ids) > known:  # parameters that were frozen train now
                state.populate(self.engine, self.state)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also during training: the new parameters begin with a window of their own, and are selected at its close."""
        with NOWHERE if self._engine is None else self.engine.uninterrupted():
            group = dict(param_group)
            _peek(group)
            present = [(_name(group, place), param) for place, param in enumerate(group["params"])]
            present = [(name, param) if isinstance(param, Tensor) else param for name, param in present]
            check_distinct(self._named(self.param_groups, frozen=True) + present)
            newcomers = [(name, param) for name, param in present if param.requires_grad]
            check_trainable(self._named(self.param_groups) + newcomers)
            hyper_of(dict(self.defaults) | group)
            super().add_param_group(group)
            if self._engine is not None:
                try:
                    joining.adopt(self.engine, newcomers)
                except BaseException:
                    self.param_groups.pop()
                    raise
                state.populate(self.engine, self.state)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Before `step()` it discards what is staged, and lets go of the memory for it."""
        super().zero_grad(set_to_none)
        if self.engine.turns and self.engine.belongs_here:  # a gradient is staged
            self.engine.staging.forget_zeroed()

    def state_dict(self) -> dict[str, Any]:
        """Everything: both halves, selection, slots in flight, schedule. Tensors are shared with the optimizer, as in torch:
        save or copy them before the next step. Neither flushes nor changes training."""
        with self.engine.uninterrupted():
            state.export(self.engine, self.state)
            exported = super().state_dict()
            state.populate(self.engine, self.state)
        return exported

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken. Also writes the weights that training had at that moment, and discards
        gradients. Parameters that trained then are trained from here on, though they may be frozen in this model still.

        Raises:
            ValueError, TypeError, MemoryError: for a state that does not fit, before anything is changed.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        with self.engine.uninterrupted():
            self._load(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        self.engine.check_usable()
        named = self._named(self.param_groups, frozen=True)
        loaded = checkpoint.read(self.engine, self.param_groups, named, state_dict, self._room_is_open)
        config = self.config if loaded.room == self.config.max_update_interval else self._with_room(loaded)
        newcomers = [(name, param) for name, param in named if param in loaded.entries and param not in self.engine.ledger]
        joining.check(self.engine, newcomers)
        state.abandon(self.engine)
        try:
            if config is not self.config or not loaded.fits(self.engine):
                self.config = config
                self._replace_engine(loaded)
            state.load(self.engine, loaded)
        except BaseException as error:
            self.engine.failed = error
            raise
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key not in ("params", "param_names")})
        state.populate(self.engine, self.state)

    def _with_room(self, loaded: checkpoint.Checkpoint) -> ZenFlowConfig:
        """With the `max_update_interval` that the run that saved had chosen: phases of blocks depend on it."""
        config = self.config.replace(max_update_interval=loaded.room)
        named = self._named(self.param_groups)
        more = planner.plan(named, config).host - planner.plan(named, self.config).host
        if more > limits.available_host_bytes():
            planner.check_fits(planner.plan(named, config))
        return config

    def _replace_engine(self, loaded: checkpoint.Checkpoint) -> None:
        """By one with the blocks of a state that is to be loaded."""
        device, clock, by_user = self.engine.device, self.engine.clock, self.engine.tuner.by_user
        self.close()
        self._engine = self._new_engine(device)
        self.state.clear()
        gc.collect()  # cycles hold the old one's memory, which the new one needs
        joining.take(self._engine, loaded.residents, loaded.blocks)
        self._engine.clock, self._engine.tuner.by_user = clock, by_user

    # Beyond torch's protocol

    def flush(self) -> None:
        """Apply every gradient so far and publish plain weights: afterwards the model holds exactly what AdamW gives."""
        with self.engine.uninterrupted():
            weights.flush(self.engine)

    def exact_weights(self) -> AbstractContextManager[None]:
        """For evaluation: inside, the model holds the weights `flush()` would give; afterwards training's, bit for bit."""
        return weights.exact_weights(self.engine)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_ over all parameters, with fp32 norms; returns the norm before clipping."""
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be a number, at least 0; got {max_norm}")
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        grads = [grad for param in params if (grad := gradient_of(param)) is not None]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]  # torch's own round to bf16
        ranks = RankSums([(groups_of(param), 1) for param in params], self.engine.device)
        if ranks.needed:
            norms = list(ranks(torch.stack(norms).square()).sqrt())
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float32, device="cpu")
        norm = self.engine.agreement.mean(norm)
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def full_gradient(self, param: nn.Parameter) -> Tensor | None:
        """The plain gradient between backward and step(), on the device; `.grad` of a staged one is a handle without memory.
        Of a sharded parameter a DTensor, as `.grad` is."""
        grad = gradient_of(param)
        return whole(param, grad.staged.full()) if isinstance(grad, StagedGradient) else param.grad

    def set_update_interval(self, interval: int) -> None:
        """Change S; each block adopts it when its window closes. Turns off `update_interval="auto"`, and ends an
        `interval_schedule`; the log says so."""
        if isinstance(interval, bool) or not isinstance(interval, int) or not 1 <= interval <= self.config.max_update_interval:
            raise ValueError(
                f"update_interval must be a whole number from 1 to max_update_interval, "
                f"which is {self.config.max_update_interval} since construction; got {interval!r}"
            )
        self.engine.tuner.set_by_user(self.engine.clock, interval)

    @property
    def interval_history(self) -> tuple[IntervalChange, ...]:
        """Every change of S so far. What `interval_schedule` takes: `{change.call: change.interval for change in ...}`."""
        return tuple(self.engine.tuner.history)

    def metrics(self) -> dict[str, Any]:
        """Numbers of the last step, and some of the whole run (docs/configuration.md says which); waits for the device.
        rho: share of squared gradient norm in deferred channels. retention: share of a selection that the last one kept.
        Times in ms, sizes in bytes."""
        engine = self.engine
        retention, by_kind = mean_by_kind([(w.weight.kind, w.block.half.retention[w.place]) for w in engine.weights.values()])
        return {
            "call": engine.clock.call,
            "interval": 1 if engine.clock.warming else engine.clock.interval,
            "interval_changes": len(engine.tuner.history),
            "warming_up": engine.clock.warming,
            "host_bytes": sum(block.host_nbytes for block in engine.blocks) + engine.pool.nbytes,
            "device_bytes": engine.device_nbytes,
            **engine.meter.report(),
            "host_ms_total": engine.worker.busy_seconds * 1e3,
            "host_threads": engine.worker.threads,
            "retention": retention,
            "retention_by_kind": by_kind,
        }

    def close(self) -> None:
        """End the threads, free the slots, remove the hooks from the model. Happens by itself when the optimizer is deleted."""
        self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("ZenFlowAdamW cannot be pickled or copied: it owns threads; use state_dict() and load_state_dict()")

    def _named(self, groups: list[dict[str, Any]], frozen: bool = False) -> list[tuple[str, nn.Parameter]]:
        return [
            (_name(group, place), param)
            for group in groups
            for place, param in enumerate(group["params"])
            if frozen or param.requires_grad
        ]


def _name(group: dict[str, Any], place: int) -> str:
    return group["param_names"][place] if "param_names" in group else ""


def _as_groups(params: Iterable[Any]) -> list[Any]:
    if isinstance(params, nn.Module):
        raise TypeError("pass model.named_parameters(), not the model itself")
    if isinstance(params, Tensor):
        raise TypeError(
            "params must be an iterable of parameters, named parameters or groups, not one tensor: wrap it in a list"
        )
    groups = list(params)
    if not groups or (isinstance(groups[0], dict) and not any(list(_peek(group)) for group in groups)):
        raise ValueError("no parameters to optimize: the list is empty")
    return groups


def _peek(group: dict[str, Any]) -> list[Any]:
    """The parameters of a group, made a list in place so that an iterator is not used up."""
    params = group["params"]
    if isinstance(params, (set, frozenset)):
        raise TypeError("a group's params must be in order: give a list instead of a set, whose order changes between runs")
    members = [params] if isinstance(params, Tensor) else list(params)
    group["params"] = members
    return members


def _agreed(named: Sequence[tuple[str, nn.Parameter]], config: ZenFlowConfig) -> ZenFlowConfig:
    """With the `max_update_interval` that every rank has room for."""
    room = Agreement(param for _, param in named).least(config.max_update_interval, shard_of(named[0][1]).device)
    return config if room == config.max_update_interval else config.replace(max_update_interval=room)
