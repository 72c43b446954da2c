#!/usr/bin/env python3
"""Does V(s_p) know which problems the policy solves? Compares it with the solve rate measured over many samples.

    python tests/value_check.py RUN_FOLDER [--checkpoint checkpoint-000020] [--samples 32] [--problems 200]

Prints Pearson's and Spearman's correlation over held-out problems (the paper reports 0.642 and 0.664 over 64 samples),
and a table of measured solve rates by fifths of V.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sppo


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """Pearson's correlation of [n] with [n]."""
    return torch.corrcoef(torch.stack([x, y]))[0, 1].item()


def ranks(x: torch.Tensor) -> torch.Tensor:
    """Ranks [n] of [n]; equal values share their mean rank. Pearson's correlation of ranks is Spearman's."""
    _, place, count = torch.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2)[place]


def load_run(folder: Path, checkpoint: str, extra: list[str] = ()):
    """Config, policy, critic, tokenizer and evaluation problems of a run, with the weights of one of its checkpoints."""
    cfg = sppo.parse(["--resume", str(folder), *extra])
    policy, critic, tok, critic_tok = sppo.build(cfg)
    _, problems = sppo.split_problems(cfg, tok, critic_tok)
    state = torch.load(folder / checkpoint / "training.pt", weights_only=True)["models"]
    policy.load_state_dict(state["policy"])
    if critic is not None:
        critic.load_state_dict(state["critic"])
    return cfg, policy, critic, tok, problems


@torch.no_grad()
def value_and_solve_rate(cfg, policy, critic, tok, problems, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """V(s_p) [n] and the share of `samples` responses that are right [n]."""
    sppo.seed_everything(cfg.seed, -2)
    ro = sppo.Rollout([p for p in problems for _ in range(samples)])
    sppo.sample(ro, policy, tok, cfg)
    sppo.verify(ro)
    once = sppo.Rollout(problems, responses=ro.responses[::samples])
    sppo.value(once, critic, cfg)
    return torch.stack([v[0] for v in once.value]), ro.reward.view(-1, samples).mean(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", default="", help="default: the newest")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--problems", type=int, default=200)
    args = parser.parse_args()
    name = args.checkpoint or sppo.newest_checkpoint(args.run).name
    cfg, policy, critic, tok, problems = load_run(args.run, name)
    V, rate = value_and_solve_rate(cfg, policy, critic, tok, problems[: args.problems], args.samples)
    print(f"{name}: {len(V)} problems x {args.samples} samples: Pearson {correlation(V, rate):.3f}, "
          f"Spearman {correlation(ranks(V), ranks(rate)):.3f}")
    for part in V.argsort().chunk(5):
        print(f"  V {V[part].mean():.2f}  solve rate {rate[part].mean():.2f}")
