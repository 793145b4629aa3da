"""ZenFlowAdamW over several GPUs, with fully_shard: `torchrun --nproc-per-node 8 fsdp.py DIRECTORY TEXT_FILE`.

Started again with the same output directory, and on as many GPUs, it goes on where it stopped. Without GPUs it runs on the CPU.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from stallfree import ZenFlowAdamW, channel_dims

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("directory", help="a model in Transformers format")
parser.add_argument("text_file", type=Path, help="some text to learn")
parser.add_argument("--output", type=Path, default="fsdp-output", help="where checkpoints go")
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))  # NCCL alone on GPUs; nothing here needs gloo beside it
rank = mesh.get_rank()
tokenizer = AutoTokenizer.from_pretrained(arguments.directory)
model = AutoModelForCausalLM.from_pretrained(arguments.directory).to(device)
axes = channel_dims(model)  # read off the modules, before they are sharded
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = ZenFlowAdamW(model.named_parameters(), lr=2e-5, max_grad_norm=1.0, channel_dim=axes)

ids = tokenizer(arguments.text_file.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
rows = ids[: len(ids) // 64 * 64].view(-1, 64).to(device)


def state() -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


whole = [path.parent for path in arguments.output.glob("checkpoint-*/.metadata")]  # which is written last
if whole:
    loaded = state()
    dcp.load(loaded, checkpoint_id=max(whole, key=lambda path: int(path.name.split("-")[1])))
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])

for step in range(optimizer.metrics()["call"], arguments.steps):
    batch = rows[torch.arange(2, device=device) + 2 * (step * mesh.size() + rank) % (len(rows) - 1)]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")

dcp.save(state(), checkpoint_id=arguments.output / f"checkpoint-{optimizer.metrics()['call']}")  # over no other
optimizer.flush()  # the model now holds exactly what AdamW gives
dist.destroy_process_group()
