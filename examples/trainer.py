"""ZenFlowAdamW in Transformers' Trainer: pass it as `optimizers=` and add `ZenFlowCallback`."""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, get_cosine_schedule_with_warmup

from stallfree import ZenFlowAdamW, channel_dims
from stallfree.integrations.transformers import ZenFlowCallback

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("directory", help="a model in Transformers format")
parser.add_argument("text_file", type=Path, help="some text to learn")
given = parser.parse_args()
tokenizer = AutoTokenizer.from_pretrained(given.directory)
model = AutoModelForCausalLM.from_pretrained(given.directory)
ids = tokenizer(given.text_file.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
if len(ids) < 9 * 256:  # 8 held out, and one to learn from
    parser.error(f"{given.text_file} has {len(ids)} tokens; this example needs at least 2304")
data = [{"input_ids": row, "labels": row} for row in ids[: len(ids) // 256 * 256].view(-1, 256)]

optimizer = ZenFlowAdamW(model.named_parameters(), lr=2e-5, channel_dim=channel_dims(model))
arguments = TrainingArguments(
    "trainer-output",
    max_steps=100,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=50,
    save_steps=50,
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=data[8:],
    eval_dataset=data[:8],
    optimizers=(optimizer, get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=100)),
    callbacks=[ZenFlowCallback()],
)
trainer.train()
trainer.save_model()
tokenizer.save_pretrained(arguments.output_dir)
