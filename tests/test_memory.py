"""The memory plan against measured peaks: `python sppo.py --plan` must be right within 15 %.

What is measured: the high-water mark of the resident set (VmHWM) of a fresh process that makes a random model of
Qwen2.5-0.5B's width and takes two whole training steps on the CPU, minus what was resident before the model was made.
Two steps, because AdamW's averages exist from the end of the first one on. Freed memory goes straight back to the
system (a low, fixed MALLOC_MMAP_THRESHOLD_), so that holes in the heap do not count as use.

    pytest tests/test_memory.py                      # 4 layers, small vocabulary, short rows: seconds
    pytest -m soak tests/test_memory.py              # and the whole model: minutes, 16 GB of free memory
    python tests/test_memory.py 24 151936 6 0 64     # layers, vocabulary, critic layers (0: all), checkpointing,
                                                     # response tokens: one measurement
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import memory_plan

GB = 2**30
PROMPTS = 8


def settings(critic_layers: int, checkpointing: bool, response: int):
    import sppo
    return sppo.Config(device="cpu", batch_size=PROMPTS, mini_batch_size=PROMPTS, critic_layers=critic_layers,
                       max_prompt_tokens=response * 3 // 2, max_response_tokens=response, micro_batch_tokens=8192,
                       gradient_checkpointing=checkpointing)


def high_water() -> int:
    """Bytes. (Not getrusage: a new program inherits its parent's ru_maxrss there.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def one_measurement(layers: int, vocabulary: int, critic_layers: int, checkpointing: bool, response: int) -> None:
    """Prints measured and planned bytes, and the planned phases; meant for a process of its own."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

    import sppo
    from value_head import Critic, keep_first_layers
    cfg = settings(critic_layers, checkpointing, response)
    config = dict(vocab_size=vocabulary, hidden_size=896, intermediate_size=4_864, num_hidden_layers=layers,
                  num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None,
                  eos_token_id=None, pad_token_id=None)
    torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()  # what torch itself loads at first use
    before = high_water()

    policy = sppo.Policy(Qwen2ForCausalLM(Qwen2Config(**config)), cfg.temperature).eval()
    backbone = Qwen2Model(Qwen2Config(**config))
    critic = Critic(keep_first_layers(backbone, critic_layers) if critic_layers else backbone).eval()
    for model in (policy.lm, critic.backbone) if checkpointing else ():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizers = sppo.make_optimizers(cfg, policy, critic)
    tok = SimpleNamespace(end_ids={vocabulary}, pad_id=0, decode=lambda ids, **how: "")  # an end that never comes
    for step in (1, 2):
        ids = torch.randint(0, vocabulary, (PROMPTS, cfg.max_prompt_tokens))
        ro = sppo.Rollout([sppo.Problem("", row, row, "1") for row in ids])
        sppo.sample(ro, policy, tok, cfg)
        ro.reward = torch.tensor([1.0, 0.0] * (PROMPTS // 2))
        sppo.value(ro, critic, cfg)
        sppo.advantage(ro, cfg)
        stats = sppo.update(policy, critic, optimizers, ro, cfg, step)
        assert stats["policy_steps"] == 1 and stats["critic_steps"] == 1 and stats["tokens"] == PROMPTS * response
    measured = high_water() - before

    shape = memory_plan.Shape(vocabulary, 896, 4_864, layers, 128, 896, True)
    assert memory_plan.parameters(shape, layers, True) == sum(p.numel() for p in policy.parameters())
    phases = memory_plan.plan(cfg, shape, shape)
    print(measured, memory_plan.peak(phases),
          {name: f"{sum(items.values()) / GB:.2f}" for name, items in phases.items()})


def measure(layers: int, vocabulary: int, critic_layers: int, checkpointing: bool, response: int) -> tuple[int, int]:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576",
                                "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *map(str, (layers, vocabulary, critic_layers, int(checkpointing), response))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    measured, planned, *_ = done.stdout.split()
    return int(measured), int(planned)


linux_only = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")


@linux_only
@pytest.mark.parametrize("critic_layers, checkpointing", [
    (0, False), pytest.param(1, True, marks=pytest.mark.soak)])
def test_plan_is_right_for_a_few_layers(critic_layers, checkpointing):
    measured, planned = measure(4, 20_000, critic_layers, checkpointing, response=16)
    assert abs(measured / planned - 1) < 0.15, (measured / GB, planned / GB)


@linux_only
@pytest.mark.soak
@pytest.mark.parametrize("critic_layers", [0, 6])
def test_plan_is_right_for_the_whole_model(critic_layers):
    measured, planned = measure(24, 151_936, critic_layers, checkpointing=False, response=64)
    assert abs(measured / planned - 1) < 0.15, (measured / GB, planned / GB)
    assert measured < 24 * GB


if __name__ == "__main__":
    one_measurement(*map(int, sys.argv[1:]))
