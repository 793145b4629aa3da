"""ZenFlowAdamW in Transformers' Trainer: pass it as `optimizers=` and add `ZenFlowCallback`."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, get_cosine_schedule_with_warmup

from stallfree import ZenFlowAdamW, channel_dims
from stallfree.integrations.transformers import ZenFlowCallback

directory, text_file = sys.argv[1:]  # a model in Transformers format; some text to learn
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory)
ids = tokenizer(Path(text_file).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
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
