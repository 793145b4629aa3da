"""The time of a training step over several GPUs with `fully_shard`, against its floor, and what ranks tell each other.

    torchrun --nproc-per-node 2 benchmarks/fsdp.py --model 1.5b --batch 8 --output OUT.json stallfree cpu-offload

Modes are those of `stallfree bench step` that shard, and two peers: `cpu-offload`, fully_shard's CPUOffloadPolicy with
torch.optim.AdamW on the host (moments in the type of the weights, no fp32 masters: less work than the others do), and
`deepspeed-zero-offload`. All are in one process per rank and take turns in rounds; the floor always takes part. A round is
timed from a barrier to the end of its slowest rank, with no synchronization between. Bytes, stalls and memory are those of rank
0, bytes per parameter that it holds. Every round is printed and written at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from stallfree.cli.bench.environment import environment
from stallfree.cli.bench.measure import REHEARSAL, LocalRunner, host_bytes
from stallfree.cli.bench.modes import ADAMW, FLOOR, LR, Mode, Training, WithOptimizer, build_training, parse_mode
from stallfree.cli.bench.peers import WithDeepSpeed, deepspeed_settings
from stallfree.cli.bench.records import MIB, Result, Round, row
from stallfree.cli.bench.settings import BenchSettings
from stallfree.cli.bench.shapes import build_model, model_config, random_batch
from stallfree.cli.bench.table import show_table
from stallfree.engine.blocks import by_modules
from stallfree.limits import GIB

CPU_OFFLOAD, DEEPSPEED = "cpu-offload", "deepspeed-zero-offload"
GRADIENT_BYTES = 2  # of an element, in an all-gather that a selection over whole gradients would need


class ShardedRunner(LocalRunner):
    """A mode on this rank."""

    def _prepare(self) -> tuple[Training, int]:
        model = build_model(self.config, self.settings, self.settings.device)
        torch.manual_seed(dist.get_rank())  # each has its own batch
        ids = random_batch(self.config, self.settings)
        count = sum(param.numel() for param in model.parameters())
        if self.mode.name == DEEPSPEED:
            return OfAllRanks(model, ids, deepspeed_settings(self.mode, self.settings)), count // dist.get_world_size()
        mode = self.mode
        if mode.config is not None:
            mode = dataclasses.replace(mode, config=by_modules(mode.config, model))
        policy = {"offload_policy": CPUOffloadPolicy(pin_memory=self.on_gpu)} if mode.name == CPU_OFFLOAD else {}
        mesh = init_device_mesh(self.settings.device, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)
        held = sum(param.to_local().numel() for param in model.parameters())
        if mode.name == CPU_OFFLOAD:
            return WithOptimizer(model, ids, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)), held
        return build_training(mode, model, ids, self.settings), held

    def _synchronize(self) -> None:
        super()._synchronize()
        dist.barrier()

    def _timed(self, step: Callable[[], None], steps: int) -> tuple[float, list[float]]:
        """Of the slowest rank: the round, and each step."""
        dist.barrier()
        seconds, step_ms = super()._timed(step, steps)
        times = torch.tensor([seconds, *step_ms], dtype=torch.float64, device=self.settings.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        seconds, *step_ms = times.tolist()
        return seconds, step_ms

    def all_reduced_bytes(self) -> int:
        """What one more step gives to all-reduces: those of the optimizer, as fully_shard has none on one mesh dimension."""
        assert self.training is not None
        given, all_reduce = [0], dist.all_reduce

        def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            given[0] += tensor.nbytes
            return all_reduce(tensor, *args, **options)

        dist.all_reduce = counted
        try:
            self.training.step()
        finally:
            dist.all_reduce = all_reduce
        return given[0]


class OfAllRanks(WithDeepSpeed):
    """DeepSpeed in the process group that is there."""

    def __init__(self, model: nn.Module, ids: torch.Tensor, config: dict[str, Any]) -> None:
        Training.__init__(self, model, ids)
        major, minor = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"  # it cannot read "9.0a"
        import deepspeed

        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Of this rank, in bytes."""

    host: int
    reserved: int

    @classmethod
    def now(cls, on_gpu: bool) -> Memory:
        return cls(host_bytes(children=False), torch.cuda.memory_reserved() if on_gpu else 0)


class Benchmark:
    """All modes and what is known of them so far."""

    def __init__(self, settings: BenchSettings, modes: list[Mode], output: Path | None, command: str) -> None:
        self.settings, self.output, self.command = settings, output, command
        config = model_config(settings)
        rehearsal = ShardedRunner(Mode(FLOOR, FLOOR), config, settings)
        rehearsal.build(REHEARSAL)
        rehearsal.close()
        self.parameters = sum(param.numel() for param in build_model(config, settings, "meta").parameters())
        of_peers = settings.of_peers()
        self.runners = [ShardedRunner(mode, config, of_peers if is_peer(mode) else settings) for mode in modes]
        self.results = [Result(mode.text) for mode in modes]
        self.all_reduced: dict[str, int] = {}

    def run(self) -> None:
        for runner, result in zip(self.runners, self.results, strict=True):
            self._build(runner, result)
        self.before = Memory.now(self.runners[0].on_gpu)
        for number in range(self.settings.rounds):
            self._round(number)
            if number == 0:  # caches are warm, and an interrupted run has it
                self._count_all_reduced()
            self._write()
        for runner in self.runners:
            runner.close()

    def _build(self, runner: ShardedRunner, result: Result) -> None:
        try:
            result.footprint = runner.build()
        except Exception as error:  # whatever a library raises; the other modes go on
            result.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if not self._on_all(not result.error):
            result.error = result.error or "failed on another rank"
            runner.close()
        say(f"built {result.mode}: {result.error or 'warmed up'}")
        if result.footprint is not None and result.footprint.warming_up:
            result.note = "its own warm-up is longer than --warm-up"

    def _round(self, number: int) -> None:
        floor: Round | None = None
        for runner, result in zip(self.runners, self.results, strict=True):
            if result.error:
                continue
            turn = runner.round()
            floor = floor or turn  # which comes first
            result.rounds.append(turn)
            result.beside.append(floor)
            mean, beside = (1e3 * entry.seconds / len(entry.step_ms) for entry in (turn, floor))
            say(f"round {number + 1}: {result.mode} {mean:.2f} ms per step, {mean / beside:.3f} x floor")

    def _count_all_reduced(self) -> None:
        for runner, result in zip(self.runners, self.results, strict=True):
            if runner.mode.config is not None and not result.error:
                self.all_reduced[result.mode] = runner.all_reduced_bytes()

    def _on_all(self, true: bool) -> bool:
        value = torch.tensor(int(true), device=self.settings.device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return bool(value)

    def _write(self) -> None:
        """What there is, on rank 0."""
        now = Memory.now(self.runners[0].on_gpu)
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, [(self.before, now), [sum(r.host_bytes for r in x.rounds) for x in self.results]])
        if dist.get_rank():
            return
        floor = self.results[0].footprint
        rows = [row(result, floor) for result in self.results]
        all_gather = GRADIENT_BYTES * self.parameters
        for place, numbers in enumerate(rows):
            numbers["host_growth_MiB_by_rank"] = [modes[place] / MIB for _, modes in by_rank]
            if numbers["mode"] in self.all_reduced:
                given = self.all_reduced[numbers["mode"]]
                numbers |= {
                    "all_reduce_bytes": given,
                    "all_gather_bytes": all_gather,
                    "all_gather_to_all_reduce": all_gather / given if given else None,
                }
        self.report = {
            "environment": environment(self.settings)
            | {
                "command": self.command,
                "ranks": dist.get_world_size(),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())) if self.settings.device == "cuda" else None,
            },
            "parameters": self.parameters,
            "rounds": len(self.results[0].rounds),
            "memory_by_rank": [
                {
                    "reserved_GiB": [before.reserved / GIB, after.reserved / GIB],
                    "reserved_growth_MiB": (after.reserved - before.reserved) / MIB,
                    "host_GiB": [before.host / GIB, after.host / GIB],
                    "host_growth_MiB": (after.host - before.host) / MIB,
                }
                for (before, after), _ in by_rank
            ],
            "modes": rows,
        }
        if self.output is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.write_text(json.dumps(self.report, indent=2) + "\n", encoding="utf-8")

    def show(self) -> None:
        """The table, on rank 0."""
        if dist.get_rank():
            return
        rows = self.report["modes"]
        show_table(rows, 200)
        for numbers in rows:
            if "all_reduce_bytes" in numbers:
                print(
                    f"{numbers['mode']}: {numbers['all_reduce_bytes']:,} bytes given to all-reduces per step; "
                    f"an all-gather of all gradients: {numbers['all_gather_bytes']:,}, "
                    f"{numbers['all_gather_to_all_reduce'] or float('inf'):,.0f} times as many"
                )
            if "error" in numbers:
                print(f"{numbers['mode']}: {numbers['error']}")
        for rank, memory in enumerate(self.report["memory_by_rank"]):
            growth = [f"{name} memory grew by {memory[f'{name}_growth_MiB']:.0f} MiB" for name in ("reserved", "host")]
            print(f"rank {rank}: {', '.join(growth)}")


def is_peer(mode: Mode) -> bool:
    return mode.name in (CPU_OFFLOAD, DEEPSPEED)


def say(text: str) -> None:
    """On rank 0, at once, so that an interrupted run has it."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def chosen(names: list[str], on_gpu: bool) -> list[Mode]:
    """The modes of the command line, the floor first."""
    modes = [Mode(FLOOR, FLOOR)]
    for name in names:
        mode = Mode(name, name) if name == CPU_OFFLOAD else parse_mode(name)
        if mode.name == ADAMW or (mode.peer is not None and mode.name != DEEPSPEED):
            raise SystemExit(f"mode {name!r} does not run over ranks here")
        if mode.name == DEEPSPEED and (find_spec("deepspeed") is None or not on_gpu):
            say(f"left out {name}: {mode.why_absent('cuda' if on_gpu else 'cpu')}")
        elif mode.name != FLOOR:
            modes.append(mode)
    return modes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", default=["stallfree", CPU_OFFLOAD, DEEPSPEED])
    parser.add_argument("--model", default="1.5b", help="0.5b, 1.5b, 3b, 7b (shapes of Qwen2.5) or tiny")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of a mode per round")
    parser.add_argument("--peer-steps", type=int, default=5, help="of a peer per round")
    parser.add_argument("--warm-up", type=int, default=12, help="steps before the first round")
    parser.add_argument("--peer-warm-up", type=int, default=3, help="of a peer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--output", type=Path, help="a JSON file")
    given = parser.parse_intermixed_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun")
    on_gpu, ranks = given.device == "cuda", int(os.environ["LOCAL_WORLD_SIZE"])
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)  # torchrun says 1, and peers compute on the host
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in vars(given).items() if name not in NOT_SHOWN]
    words += ["--gradient-checkpointing"] * given.gradient_checkpointing + given.modes
    command = shlex.join(["torchrun", "--nproc-per-node", str(ranks), "benchmarks/fsdp.py", *words])
    modes = chosen(given.modes, on_gpu)
    settings = BenchSettings(
        modes=[mode.text for mode in modes],
        **{name: getattr(given, name) for name in BenchSettings.model_fields if name != "modes" and hasattr(given, name)},
    )
    benchmark = Benchmark(settings, modes, given.output, command)
    benchmark.run()
    benchmark.show()
    dist.destroy_process_group()


NOT_SHOWN = ("modes", "output", "gradient_checkpointing")  # among the options with a value

if __name__ == "__main__":
    sys.exit(main())
