"""ZenFlowAdamW in a loop of your own: the optimizer's construction and `exact_weights()` are all that differs from AdamW."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stallfree import ZenFlowAdamW, channel_dims

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("directory", help="a model in Transformers format")
parser.add_argument("text_file", type=Path, help="some text to learn")
arguments = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(arguments.directory)
model = AutoModelForCausalLM.from_pretrained(arguments.directory).to(device)
optimizer = ZenFlowAdamW(model.named_parameters(), lr=2e-5, max_grad_norm=1.0, channel_dim=channel_dims(model))
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)

ids = tokenizer(arguments.text_file.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
if len(ids) < 5 * 256:  # 4 to learn from at a time, and one held out
    parser.error(f"{arguments.text_file} has {len(ids)} tokens; this example needs at least 1280")
*batches, held_out = ids[: len(ids) // 256 * 256].view(-1, 256).to(device).split(4)

for step, batch in enumerate(batches, 1):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == len(batches):
        with torch.no_grad(), optimizer.exact_weights():
            print(f"step {step}: held-out loss {model(input_ids=held_out, labels=held_out).loss:.4f}")

optimizer.flush()  # the model now holds exactly what AdamW gives
model.save_pretrained("plain-loop-output")
tokenizer.save_pretrained("plain-loop-output")
