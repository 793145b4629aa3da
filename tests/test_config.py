"""ZenFlowConfig: presets, checks, and the forms it is written in."""

import dataclasses
import math

import pytest
import torch

from stallfree import ZenFlowConfig

RULE = ("topk_ratio", "update_interval", "stagger", "lag", "rule", "lookahead", "overlap_step", "update_in_backward")
PRESETS = {
    "stallfree": (0.1, "auto", True, 1, "replay", "auto", True, False),
    "zenflow": (0.1, 4, False, 4, "mean", 0.0, True, False),
    "zenflow-star": (0.1, 4, False, 0, "mean", 0.0, False, False),
    "zero-offload": (0.0, 1, False, 0, "replay", 0.0, False, False),
    "zero-offload-dpu": (0.0, 1, False, 1, "replay", 0.0, True, False),
    "stronghold": (0.0, 1, False, 0, "replay", 0.0, True, True),
    "device": (1.0, 1, False, 0, "replay", 0.0, True, False),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_row_of_settings(preset):
    config = ZenFlowConfig(preset=preset)
    assert tuple(getattr(config, name) for name in RULE) == PRESETS[preset]


def test_the_default_preset_is_stallfree():
    assert ZenFlowConfig() == ZenFlowConfig(preset="stallfree")


def test_what_is_given_wins_over_the_preset():
    config = ZenFlowConfig(preset="zenflow", topk_ratio=0.2, lookahead=1.0)
    assert (config.topk_ratio, config.lookahead, config.rule) == (0.2, 1.0, "mean")


@pytest.mark.parametrize("interval, lag", [(2, 2), (8, 8), ("auto", 2)])
def test_the_paper_s_lag_is_one_window(interval, lag):
    assert ZenFlowConfig(preset="zenflow", update_interval=interval).lag == lag
    assert ZenFlowConfig(preset="zenflow", update_interval=interval, lag=1).lag == 1


@pytest.mark.parametrize(
    "lookahead, lag, interval, expected",
    [("auto", 1, 4, 2.0), ("auto", 0, 1, 0.0), ("auto", 4, 4, 3.5), (0, 1, 4, 0.0), (1.5, 1, 9, 1.5)],
)
def test_look_ahead_follows_the_interval_unless_it_is_given(lookahead, lag, interval, expected):
    assert ZenFlowConfig(lookahead=lookahead, lag=lag).lookahead_at(interval) == expected


def test_room_for_slots_covers_the_interval():
    assert ZenFlowConfig(update_interval=6).max_update_interval == 6
    assert ZenFlowConfig(update_interval=2, max_update_interval=8).max_update_interval == 8
    assert ZenFlowConfig(update_interval=2, interval_schedule={9: 5}).max_update_interval == 5
    with pytest.raises(ValueError, match="interval_schedule"):
        ZenFlowConfig(update_interval=2, max_update_interval=4, interval_schedule={9: 5})


@pytest.mark.parametrize(
    "settings, rooms",
    [({}, (8, 4, 2)), (dict(interval_schedule={9: 4}), (8, 4)), (dict(interval_schedule={9: 12}), (12,))],
)
def test_auto_leaves_its_room_to_the_optimizer(settings, rooms):
    config = ZenFlowConfig(**settings)
    assert config.room_is_open
    assert config.rooms == rooms
    assert config.max_update_interval == rooms[0]
    assert not config.replace(max_update_interval=16).room_is_open
    assert not ZenFlowConfig(update_interval=2).room_is_open


def test_it_is_frozen_and_keyword_only():
    config = ZenFlowConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.topk_ratio = 0.5
    with pytest.raises(TypeError):
        ZenFlowConfig("stallfree")
    assert config.topk_ratio == 0.1


BAD = [
    ("preset", "nonsense"),
    *[("topk_ratio", value) for value in (-0.01, 1.01, math.nan, math.inf, "0.1", True)],
    *[("update_interval", value) for value in (0, -3, 2.5, "often", True)],
    *[("staleness_budget", value) for value in (0, -1.0, math.inf, "small")],
    *[("interval_schedule", value) for value in (4, [4], {"soon": 4}, {-1: 4}, {5: 0}, {5: 2.5})],
    ("rule", "median"),
    *[("lag", value) for value in (-1, 0.5, "late")],
    *[("lookahead", value) for value in (-1.0, math.nan, "far")],
    *[("deferred_lr_scale", value) for value in (0, -1.0, math.inf)],
    *[("full_warm_up_rounds", value) for value in (-1, 2.5, "long")],
    *[("max_grad_norm", value) for value in (0.0, -1.0, math.nan, "1")],
    *[("select_interval", value) for value in (0, 1.5)],
    *[("channel_dim", value) for value in (2, -1, "rows", {"embed": 3})],
    *[("score_decay", value) for value in (-0.1, 1.0, math.nan)],
    *[("min_numel", value) for value in (-1, 0.5)],
    ("moments_dtype", "float16"),
    *[(name, "yes") for name in ("stagger", "overlap_step", "update_in_backward")],
    ("host_kernel", "fortran"),
    *[("host_threads", value) for value in (0, "many")],
    *[("pin_host_threads", value) for value in ("maybe", "auto")],
    ("block_numel", 0),
    ("max_update_interval", 3),
    ("seed", 1.5),
]


@pytest.mark.parametrize("name, value", BAD)
def test_a_bad_value_is_refused_with_its_name_and_what_is_allowed(name, value):
    with pytest.raises(ValueError) as refused:
        ZenFlowConfig(**dict(update_interval=4) | {name: value})
    assert name in str(refused.value)
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "beside", [dict(interval_schedule={1: 2}), dict(max_update_interval=4), dict(lookahead="auto"), dict()]
)
def test_an_interval_is_checked_before_anything_follows_from_it(preset, beside):
    with pytest.raises(ValueError, match=r"^update_interval must be .*; got 'Auto'$"):
        ZenFlowConfig(preset=preset, update_interval="Auto", **beside)
    with pytest.raises(ValueError, match=r"^interval_schedule must be .*; got \{1: 'two'\}$"):
        ZenFlowConfig(preset=preset, **beside | dict(interval_schedule={1: "two"}))


@pytest.mark.parametrize("setting", [dict(update_interval=2), dict(lag=1), dict(topk_ratio=0.1), dict(max_grad_norm=1.0)])
def test_stronghold_refuses_what_it_cannot_keep(setting):
    with pytest.raises(ValueError, match=rf"(?s){next(iter(setting))}.*stronghold|stronghold.*{next(iter(setting))}"):
        ZenFlowConfig(preset="stronghold", **setting)


# Forms


def test_torch_s_own_name_of_a_type_is_the_same_setting():
    config = ZenFlowConfig(moments_dtype=torch.bfloat16)
    assert config == ZenFlowConfig(moments_dtype="bfloat16")
    assert ZenFlowConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match=r"moments_dtype must be .*; got 'float16'"):
        ZenFlowConfig(moments_dtype=torch.float16)


CONFIGS = [
    *[ZenFlowConfig(preset=preset) for preset in PRESETS],
    ZenFlowConfig(channel_dim={"embed": 0, "head": 1}, max_grad_norm=1.0, full_warm_up_rounds=7, host_threads=3, seed=5),
    ZenFlowConfig(interval_schedule={14: 4, 78: 1}, staleness_budget=0.5),
    ZenFlowConfig(preset="zenflow", update_interval=8, max_update_interval=16, moments_dtype="bfloat16"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_form_gives_the_config_back(config, tmp_path):
    assert ZenFlowConfig.from_dict(config.to_dict()) == config
    assert ZenFlowConfig.from_json(config.to_json()) == config
    assert ZenFlowConfig.from_yaml(config.to_yaml()) == config
    for suffix, text in ((".json", config.to_json()), (".yaml", config.to_yaml()), (".yml", config.to_yaml())):
        (tmp_path / f"config{suffix}").write_text(text)
        assert ZenFlowConfig.load(tmp_path / f"config{suffix}") == config


def test_a_written_config_may_name_only_what_it_changes():
    assert ZenFlowConfig.from_yaml("preset: zenflow\nupdate_interval: 8\n") == ZenFlowConfig(
        preset="zenflow", update_interval=8
    )


@pytest.mark.parametrize(
    "read, text",
    [
        (ZenFlowConfig.from_json, '{"topk_ration": 0.1}'),
        (ZenFlowConfig.from_yaml, "topk_ration: 0.1"),
        (ZenFlowConfig.from_dict, {"topk_ration": 0.1}),
    ],
)
def test_unknown_settings_are_refused_with_the_nearest_one(read, text):
    with pytest.raises(ValueError, match=r"(?s)topk_ration.*topk_ratio"):
        read(text)


@pytest.mark.parametrize("text", ["[1, 2]", "null", "3"])
def test_a_config_is_a_mapping(text):
    for read in (ZenFlowConfig.from_json, ZenFlowConfig.from_yaml):
        with pytest.raises(ValueError, match="mapping"):
            read(text)


def test_replace_checks_and_keeps_the_rest():
    config = ZenFlowConfig(preset="zenflow", topk_ratio=0.2)
    assert config.replace(lag=0) == ZenFlowConfig(preset="zenflow", topk_ratio=0.2, lag=0)
    with pytest.raises(ValueError, match="topk_ratio"):
        config.replace(topk_ratio=2.0)
    with pytest.raises(ValueError, match="nonsense"):
        config.replace(nonsense=1)
    with pytest.raises(ValueError, match="preset"):
        config.replace(preset="device")


def test_a_mapping_given_later_changed_does_not_change_the_config():
    dims = {"embed": 0}
    config = ZenFlowConfig(channel_dim=dims)
    dims["embed"] = 1
    assert config.channel_dim == {"embed": 0}


def test_a_configuration_that_was_saved_can_be_changed():
    saved = ZenFlowConfig(preset="zenflow", topk_ratio=0.2)
    changed = ZenFlowConfig.from_yaml(saved.to_yaml()).replace(update_interval=8)
    assert (changed.update_interval, changed.lag, changed.max_update_interval, changed.topk_ratio) == (8, 8, 8, 0.2)
