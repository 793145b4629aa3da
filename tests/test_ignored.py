"""Whoever gives a setting that changes nothing is told, once, where the optimizer is built."""

import warnings

import pytest
import torch
from torch import nn

from stallfree import PRESETS, ZenFlowAdamW, ZenFlowConfig, channel_dims


def told(settings, names=("embed.weight", "proj.weight")):
    """What building an optimizer warns of, and the optimizer."""
    named = [(name, nn.Parameter(torch.ones(4, 6))) for name in names]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = ZenFlowAdamW(named if any(names) else [param for _, param in named], min_numel=0, **settings)
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught], optimizer


@pytest.mark.parametrize(
    "settings, named",
    [
        (dict(host_kernel="torch", host_threads=7), ["host_threads=7"]),
        (dict(host_kernel="torch", pin_host_threads=True), ["pin_host_threads=True"]),
        (dict(update_interval=2, staleness_budget=0.5), ["staleness_budget=0.5"]),
        (dict(preset="zero-offload", staleness_budget=0.5), ["staleness_budget=0.5"]),
        (dict(topk_ratio=0, select_interval=8, score_decay=0.5), ["select_interval=8", "score_decay=0.5"]),
        (dict(preset="device", select_interval=8), ["select_interval=8"]),
    ],
)
def test_a_setting_without_effect_is_named(settings, named):
    sentences, optimizer = told(settings)
    assert [sentence.split(" is ignored: ")[0] for sentence in sentences] == named
    assert all("Leave it out" in sentence for sentence in sentences)
    optimizer.close()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_nothing_without_effect(preset):
    sentences, optimizer = told(dict(preset=preset))
    assert sentences == []
    optimizer.close()


@pytest.mark.parametrize(
    "settings",
    [
        dict(host_threads=2),
        dict(host_kernel="torch", host_threads="auto"),
        dict(staleness_budget=0.5),
        dict(update_interval=2, staleness_budget=1.0),
        dict(select_interval=8, score_decay=0.5),
        dict(staleness_budget=0.5, interval_schedule={9: 4}),  # a run that is repeated by its record
    ],
)
def test_a_setting_that_counts_or_is_the_default_is_not(settings):
    sentences, optimizer = told(settings)
    assert sentences == []
    optimizer.close()


def test_it_is_told_of_a_config_with_keywords_on_top():
    param = nn.Parameter(torch.ones(4, 6))
    with pytest.warns(UserWarning, match=r"^staleness_budget=0\.5 is ignored") as caught:
        ZenFlowAdamW([param], config=ZenFlowConfig(staleness_budget=0.5), update_interval=2).close()
    assert [warning.filename for warning in caught] == [__file__]


def test_threads_of_torch_are_not_reported_as_ours():
    _, optimizer = told(dict(host_kernel="torch", host_threads=7))
    assert optimizer.metrics()["host_threads"] == 1
    optimizer.close()


# Channels by name


@pytest.mark.parametrize("dims, lost", [({"emebd": 0, "proj": 1}, "'emebd'"), ({"embed.weight": 0, "porj": 1}, "'porj'")])
def test_a_key_of_channel_dim_that_is_part_of_no_name(dims, lost):
    (sentence,), optimizer = told(dict(channel_dim=dims))
    assert sentence.startswith(f"channel_dim is ignored for {lost}:")
    optimizer.close()


def test_channel_dim_for_parameters_without_names():
    (sentence,), optimizer = told(dict(channel_dim={"embed": 0}), names=("", ""))
    assert "give the optimizer model.named_parameters()" in sentence
    optimizer.close()


@pytest.mark.parametrize("dims", [{"embed": 0}, {"weight": 1, "proj.weight": 0}, 1, "auto"])
def test_a_key_that_is_part_of_a_name(dims):
    sentences, optimizer = told(dict(channel_dim=dims))
    assert sentences == []
    optimizer.close()


def test_the_axes_of_a_whole_model_serve_for_a_part_of_it():
    """Tied, frozen, or another optimizer's: `channel_dims` lists all of a model's weights."""
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "proj": nn.Linear(4, 4), "lm_head": nn.Linear(4, 6, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    model["proj"].weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ZenFlowAdamW(model["embed"].named_parameters("embed"), min_numel=0, channel_dim=channel_dims(model)).close()
        ZenFlowAdamW(model.named_parameters(), min_numel=0, channel_dim=channel_dims(model)).close()
