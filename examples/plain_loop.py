"""ZenFlowAdamW in a loop of your own: the optimizer's construction and `exact_weights()` are all that differs from AdamW."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stallfree import ZenFlowAdamW, channel_dims

directory, text_file = sys.argv[1:]  # a model in Transformers format; some text to learn
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory).to(device)
optimizer = ZenFlowAdamW(model.named_parameters(), lr=2e-5, max_grad_norm=1.0, channel_dim=channel_dims(model))
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)

ids = tokenizer(Path(text_file).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
*batches, held_out = ids[: len(ids) // 256 * 256].view(-1, 256).to(device).split(4)

for step, batch in enumerate(batches, 1):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        with torch.no_grad(), optimizer.exact_weights():
            print(f"step {step}: held-out loss {model(input_ids=held_out, labels=held_out).loss:.4f}")

optimizer.flush()  # the model now holds exactly what AdamW gives
model.save_pretrained("plain-loop-output")
tokenizer.save_pretrained("plain-loop-output")
