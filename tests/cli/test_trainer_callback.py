"""Transformers' Trainer with ZenFlowAdamW: trains right unmodified, and the callback shows exact weights where they count."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from stallfree import ZenFlowAdamW
from stallfree.cli.finetune.models import load_model
from stallfree.integrations.transformers import ZenFlowCallback

STEPS = 8
IDS = torch.randint(0, 256, (STEPS * 6, 24), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": row, "labels": row} for row in IDS]


def zenflow(model, **settings):
    settings = {"full_warm_up_rounds": 0, "update_interval": 3} | settings
    return ZenFlowAdamW(model.named_parameters(), lr=1e-2, weight_decay=0.01, **settings)


def train(output, build, *, callbacks=(), resume=None, **options):
    model, _ = load_model("tiny", torch.float32, 0)
    optimizer = build(model)
    options = {"max_steps": STEPS, "save_strategy": "no", "logging_steps": 1} | options
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        **options,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=DATA,
        eval_dataset={"a": DATA[:9], "b": DATA[9:18]},
        optimizers=(optimizer, schedule),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def parameters(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_same(first, second):
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_accumulation_and_clipping_equal_torch_adamw(tmp_path):
    reference = train(tmp_path, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01))
    synchronous = train(tmp_path, lambda model: zenflow(model, preset="zero-offload", update_interval=1))
    norms = [record["grad_norm"] for record in reference.state.log_history if "loss" in record]
    assert min(norms) > 1  # every step was clipped
    for name, value in parameters(reference).items():
        torch.testing.assert_close(parameters(synchronous)[name], value, rtol=1e-4, atol=1e-5)


def test_evaluations_see_exact_weights_and_do_not_change_training(tmp_path):
    plain = train(tmp_path, zenflow, callbacks=[ZenFlowCallback()])
    watched = train(tmp_path, zenflow, callbacks=[ZenFlowCallback()], eval_strategy="steps", eval_steps=1)
    assert_same(parameters(plain), parameters(watched))

    # A run that ends at step 4 has flushed: its weights are what the evaluation after step 4 should have seen.
    stopped = train(tmp_path, zenflow, callbacks=[ZenFlowCallback(), StopAt(4)])
    seen = {key: record[key] for record in watched.state.log_history if record["step"] == 4 for key in record if "_loss" in key}
    assert seen.keys() == {"eval_a_loss", "eval_b_loss"}
    assert {key: stopped.evaluate()[key] for key in seen} == pytest.approx(seen, rel=1e-6)


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def test_checkpoints_hold_exact_weights_and_resume_bit_for_bit(tmp_path):
    whole = train(tmp_path / "a", zenflow, callbacks=[ZenFlowCallback()], save_strategy="steps", save_steps=5)
    stopped = train(tmp_path / "b", zenflow, callbacks=[ZenFlowCallback(), StopAt(5)])
    checkpoint = tmp_path / "a" / "checkpoint-5"
    saved = load_file(checkpoint / "model.safetensors")
    assert_same({name: value for name, value in parameters(stopped).items() if name in saved}, saved)

    resumed = train(tmp_path / "c", zenflow, callbacks=[ZenFlowCallback()], resume=str(checkpoint))
    assert resumed.state.global_step == STEPS
    assert_same(parameters(whole), parameters(resumed))


def test_the_best_model_is_what_is_left(tmp_path):
    trainer = train(
        tmp_path,
        zenflow,
        callbacks=[ZenFlowCallback()],
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_a_loss",
    )
    best = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    assert_same({name: value for name, value in parameters(trainer).items() if name in best}, best)


def test_numbers_are_logged(tmp_path):
    trainer = train(tmp_path, zenflow, callbacks=[ZenFlowCallback()])
    logged = [record for record in trainer.state.log_history if "loss" in record]
    assert len(logged) == STEPS
    assert all(0 <= record["zenflow/rho"] <= 1 and record["zenflow/bytes_down"] > 0 for record in logged)
    assert "eval" not in vars(trainer.optimizer.optimizer)  # nothing is left on the optimizer


def test_another_optimizer_is_refused(tmp_path):
    with pytest.raises(TypeError, match="ZenFlowCallback needs a ZenFlowAdamW, not AdamW: pass one as optimizers="):
        train(tmp_path, lambda model: torch.optim.AdamW(model.parameters()), callbacks=[ZenFlowCallback()])
