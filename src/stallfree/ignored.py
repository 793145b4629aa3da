"""Settings that change nothing beside the others that were chosen: whoever gives one is told, once, at construction."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from stallfree.config import ZenFlowConfig


def warn_of_ignored(config: ZenFlowConfig, names: Sequence[str], stacklevel: int) -> None:
    """names: of the optimizer's parameters. stacklevel: 2 points at the caller's line, 3 at its caller's."""
    for sentence in [*_settings(config), *_channel_dim(config, names)]:
        warnings.warn(sentence, stacklevel=stacklevel)


def _settings(config: ZenFlowConfig) -> Iterable[str]:
    """What differs from its preset, without effect."""
    usual = ZenFlowConfig(preset=config.preset)
    why: dict[str, str] = {}
    if config.host_kernel == "torch":
        why |= dict.fromkeys(
            ("host_threads", "pin_host_threads"), 'host_kernel="torch" has torch\'s threads; see torch.set_num_threads'
        )
    if config.update_interval != "auto":
        why["staleness_budget"] = f'update_interval={config.update_interval}, and not "auto", which it bounds'
    if config.topk_ratio in (0, 1):
        why |= dict.fromkeys(("select_interval", "score_decay"), f"topk_ratio={config.topk_ratio:g} leaves nothing to select")
    for name, reason in why.items():
        if getattr(config, name) != getattr(usual, name):
            yield f"{name}={getattr(config, name)!r} is ignored: {reason}. Leave it out, or change that"


def _channel_dim(config: ZenFlowConfig, names: Sequence[str]) -> Iterable[str]:
    """Keys that are part of no parameter's name."""
    if not isinstance(config.channel_dim, dict):
        return
    # `channel_dims(model)` lists all weights by their whole names, also those that another optimizer has.
    listed = not config.channel_dim.keys().isdisjoint(names)
    lost = [key for key in config.channel_dim if not any(key in name for name in names) and not (listed and "." in key)]
    if lost and not any(names):
        yield "channel_dim names parameters, and these have no names: give the optimizer model.named_parameters()"
    elif lost:
        shown = ", ".join(map(repr, lost[:4]))
        yield f"channel_dim is ignored for {shown}: no parameter's name has that in it. Correct it, or leave it out"
