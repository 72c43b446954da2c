#!/usr/bin/env python3
r"""Sequence-Level PPO (SPPO, arXiv 2604.08865): reinforcement learning of reasoning, seen as a contextual bandit.

A problem with a checkable answer need not be modelled as a token-level Markov decision process. The prompt is the
context, the whole response is the action, the verifier's verdict is the reward, and the episode ends there:

    context    s_p                            the prompt
    action     a = (a_1 ... a_T) ~ pi_old     ONE sampled response per prompt
    reward     R(s_p, a) in {0, 1}            is the boxed answer right?
    value      V_phi(s_p) = sigmoid(v_phi(s_p))   P(the policy solves s_p), from a critic that reads the prompt only
    advantage  A = R - V_phi(s_p)             one number per response, the same for each of its tokens
    update     J = E[ min(r_t A, clip(r_t, 1 - eps, 1 + eps) A) ],  r_t = pi_theta(a_t|s_p,a_<t) / pi_old(a_t|s_p,a_<t)
               estimated by the mean over all response tokens of a mini-batch
    critic     L_V = -E[ R log V + (1 - R) log(1 - V) ],  so that for each response dL_V/dv = V - R = -A

Token-level PPO would spread R over thousands of tokens through a per-token critic (GAE); GRPO would sample N responses
per prompt to get its baseline. SPPO keeps PPO's one response and GRPO's one advantage per response. For each of them
there is one function below (`--algorithm`), and the rest of the file is shared.

    python sppo.py                                       # the embedded toy: learns in minutes on a laptop's CPU
    python sppo.py --model Qwen2.5-0.5B                  # GSM8K on one 24 GB GPU
    torchrun --nproc-per-node 8 sppo.py --model DeepSeek-R1-Distill-Qwen-7B --dataset data.parquet

Read in this order: settings, mathematics, rollout, update, training loop: that is the method. Everything after the
loop is plumbing: evaluation, data, models, processes, checkpoints, the command line. Some names of the plumbing are
used before: `world()`, `rank()` and `everyone(x)` (how many processes, which one this is, the x of each of them),
`gathered` (whole weights on each process), `autocast` (bfloat16 on a GPU), `recomputing` (gradient checkpointing).

Shapes: B responses in a batch, P_i and T_i tokens in prompt and response i, S = padded length, D hidden width,
V vocabulary, N = sum of T_i = response tokens of a micro-batch, laid end to end (so no loss is ever masked); a small n
is a part of them. In formulas V is the value, and N the size of a group in GRPO and RLOO.
"""

import argparse
import csv
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import reward as verifier
from value_head import Critic, decoder_layers, keep_first_layers, value_loss

HERE = Path(__file__).resolve().parent


class UserError(Exception):
    """Bad input: printed as one line, exit code 2."""


# ---------------------------------------------------------------------------------------------------- 1. settings


def flag(default, help: str, choices=None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Config:
    """Every setting. The command line is made from this class; the whole of it is saved as config.json."""

    # what is trained on what
    model: str = flag("toy/model", "policy: a local folder, a hub id or a bare name such as Qwen2.5-0.5B")
    critic_model: str = flag("", "critic's backbone, named like --model (default: the policy's own)")
    critic_layers: int = flag(0, "keep only the first K layers of the critic's backbone (0: all)")
    dataset: str = flag("gsm8k", "training problems: .jsonl/.json/.csv/.parquet file, or hub NAME[:CONFIG[:SPLIT]]")
    eval_dataset: str = flag("", "evaluation problems (default: a hub set's test split; for a file, rows held out of it)")
    prompt_column: str = flag("", "column of the problem (default: recognised)")
    answer_column: str = flag("", "column of the answer (default: recognised); dots reach into nested columns")
    instruction: str = flag(r"Think step by step, then give the final answer as \boxed{answer}.",
                            "added to each prompt that does not speak of a box yet ('' adds nothing)")
    # the algorithm
    algorithm: str = flag("sppo", "whose advantage", choices=("sppo", "ppo", "grpo", "rloo", "remax", "reinforce"))
    group_size: int = flag(8, "grpo, rloo: responses per prompt (GRPO's N)")
    baseline: float = flag(0.5, "reinforce: the constant baseline b")
    gamma: float = flag(1.0, "ppo: discount of GAE")
    lam: float = flag(1.0, "ppo: lambda of GAE")
    critic_loss: str = flag("bce", "ppo: loss of the per-token critic (sppo is always bce)", choices=("bce", "mse"))
    clip_range: float = flag(0.2, "epsilon of the clip")
    dual_clip: float = flag(0.0, "for A < 0 also stop at r_t = this; the paper's code uses 3 (0: off, as in the paper)")
    temperature: float = flag(1.0, "sampling temperature, in training and evaluation")
    # optimisation
    steps: int = flag(200, "training steps; a step is one batch of prompts")
    batch_size: int = flag(128, "prompts per step (over all processes)")
    mini_batch_size: int = flag(32, "prompts per optimizer step (over all processes)")
    epochs: int = flag(1, "passes over each batch")
    lr: float = flag(1e-6, "policy's learning rate (AdamW)")
    critic_lr: float = flag(5e-6, "critic's learning rate")
    lr_warmup: int = flag(0, "steps over which both learning rates rise linearly")
    lr_decay: bool = flag(False, "let both learning rates fall linearly, to 0 after the last step (off: constant)")
    critic_warmup: int = flag(0, "first steps in which the critic alone learns")
    weight_decay: float = flag(0.01, "AdamW's weight decay")
    max_grad_norm: float = flag(1.0, "gradient norm above which gradients are scaled down")
    seed: int = flag(0, "seed of everything random")
    # lengths, memory, device
    max_prompt_tokens: int = flag(1024, "longer prompts are dropped, and counted")
    max_response_tokens: int = flag(1024, "sampling stops here; a response cut off here earns 0")
    micro_batch_tokens: int = flag(0, "padded tokens per forward and backward pass (0: 16384 on a GPU, 8192 on a CPU)")
    sample_batch_tokens: int = flag(131072, "prompt and response tokens sampled together: bounds the KV cache")
    gradient_checkpointing: bool = flag(False, "recompute each layer in the backward pass: less memory, more time")
    device: str = flag("", "cuda, mps or cpu (default: the best one there)")
    # evaluation, output
    eval_every: int = flag(20, "steps between evaluations (one comes before the first step, one after the last)")
    eval_samples: int = flag(1, "responses per evaluation problem (avg@k); 0: greedy only")
    eval_greedy: bool = flag(False, "also evaluate greedy decoding")
    eval_size: int = flag(256, "evaluation problems used, and at most the rows held out when there is no other set")
    eval_only: bool = flag(False, "evaluate and stop")
    show_every: int = flag(10, "steps between decoded samples")
    save_every: int = flag(50, "steps between checkpoints (the last step is always saved)")
    keep: int = flag(2, "checkpoints kept")
    out: str = flag("", "the run's folder, a new one (default: runs/MODEL-ALGORITHM-SEED-DATE)")
    resume: str = flag("", "go on with the run in this folder; other flags given change it")
    plan: bool = flag(False, "print the memory this run would need, and stop")
    trust_remote_code: bool = flag(False, "run Python code that comes with the model folder")

    def check(self) -> None:
        for name in ("batch_size", "mini_batch_size", "steps", "epochs", "max_prompt_tokens", "max_response_tokens",
                     "temperature", "clip_range", "group_size", "eval_every", "show_every", "save_every", "keep",
                     "sample_batch_tokens", "max_grad_norm", "eval_size"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name)}")
        for name in ("lr", "critic_lr", "weight_decay", "critic_warmup", "lr_warmup", "eval_samples", "critic_layers",
                     "dual_clip", "micro_batch_tokens"):
            if not getattr(self, name) >= 0:
                raise UserError(f"--{name.replace('_', '-')} must not be negative")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"--{name} must be from 0 to 1, not {getattr(self, name)}")
        if 0 < self.dual_clip <= 1 + self.clip_range:
            raise UserError(f"--dual-clip must be above 1 + clip range, or 0; not {self.dual_clip}")
        if self.algorithm in ("grpo", "rloo") and self.group_size < 2:
            raise UserError(f"--algorithm {self.algorithm} compares responses of one prompt: --group-size at least 2")
        if not (self.eval_samples or self.eval_greedy):
            raise UserError("--eval-samples 0 needs --eval-greedy, or there is nothing to evaluate")
        if self.algorithm != "ppo":
            self.critic_loss = "bce"

    @property
    def copies(self) -> int:
        """Responses per prompt."""
        return self.group_size if self.algorithm in ("grpo", "rloo") else 1


# The published recipes, and what suits smaller machines: chosen by the end of the model's name, flags win over them.
RECIPES = {
    "toy/model": dict(dataset=str(HERE / "toy/train.jsonl"), eval_dataset=str(HERE / "toy/test.jsonl"), instruction="",
                      steps=200, batch_size=128, mini_batch_size=32, lr=3e-4, critic_lr=1e-3,
                      critic_warmup=60, max_prompt_tokens=64, max_response_tokens=64, eval_samples=4, eval_greedy=True,
                      eval_every=40, save_every=20, keep=10),
    "Qwen2.5-0.5B": dict(critic_layers=12, gradient_checkpointing=True),
    "DeepSeek-R1-Distill-Qwen-1.5B": dict(
        batch_size=256, mini_batch_size=128, lr=1e-6, critic_lr=5e-6, weight_decay=0.01, max_prompt_tokens=1024,
        max_response_tokens=8192, temperature=0.6, dual_clip=3.0, gradient_checkpointing=True, eval_samples=16),
    "DeepSeek-R1-Distill-Qwen-7B": dict(
        batch_size=512, mini_batch_size=32, lr=1e-6, critic_lr=1e-5, weight_decay=0.1, max_prompt_tokens=2048,
        max_response_tokens=8192, temperature=0.6, dual_clip=3.0, gradient_checkpointing=True, eval_samples=16,
        critic_model="DeepSeek-R1-Distill-Qwen-1.5B"),
}


# ------------------------------------------------------------------------------------------------- 2. mathematics


def token_log_probs(hidden: torch.Tensor, head: nn.Module, actions: torch.Tensor, temperature: float,
                    chunk_logits: int = 2**25) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi(a_t | s_p, a_<t) at the temperature that was sampled with, and the entropy of pi there.

    hidden [N, D]: the state before each token; head: D -> V logits; actions [N]: the tokens a_t.
    Returns log-probs [N] (float32, with gradient) and entropies [N] in nats (without).
    A full table of logits [N, V] usually dominates the memory of such a trainer. Here it exists one chunk of about
    `chunk_logits` numbers at a time; the backward pass makes each chunk again instead of keeping it.
    """

    def one_chunk(hidden, actions):
        log_pi = head(hidden).float().div_(temperature).log_softmax(-1)  # [n, V]
        log_probs = log_pi.gather(-1, actions[:, None])[:, 0]  # [n]
        with torch.no_grad():  # last, as the recomputation stops at the last tensor that the backward pass needs
            return log_probs, -(log_pi.exp() * log_pi).sum(-1)  # [n], [n]

    size = max(1, chunk_logits // head.weight.shape[0])
    if len(actions) <= size:
        return one_chunk(hidden, actions)
    parts = [checkpoint(one_chunk, h, a, use_reentrant=False) for h, a in zip(hidden.split(size), actions.split(size))]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def sppo_advantage(R: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
    """SPPO: A(s_p, a) = R(s_p, a) - V_phi(s_p).  [B], [B] -> [B]

    V depends on the prompt alone, so it leaves the gradient of E[R] unbiased; and E[A^2] = p (1 - p) + (p - V)^2 is
    least where V is the solve rate p = P(R = 1 | s_p), which is what the critic learns. Nothing is divided by a spread.
    """
    return R - V


def gae_advantage(R: float, V: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """Token-level PPO: A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = R_t + gamma V_{t+1} - V_t.  V [T] -> [T]

    R_t is 0 before the last token and R there; V after the last token is 0, as the episode has ended. With lam < 1
    token t sees R through a factor (gamma lam)^(T - t).
    """
    advantage, A, T = torch.zeros_like(V), 0.0, len(V)
    for t in reversed(range(T)):
        delta = (R if t == T - 1 else gamma * V[t + 1]) - V[t]
        A = advantage[t] = delta + gamma * lam * A
    return advantage


def grpo_advantage(R: torch.Tensor, N: int) -> torch.Tensor:
    """GRPO: A_i = (R_i - mean of the group) / std of the group.  [B], groups of N in a row -> [B]

    A group that agrees has std 0, so its N responses teach nothing ("dead group").
    """
    group = R.view(-1, N)  # [B / N, N]
    return ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-6)).flatten()


def rloo_advantage(R: torch.Tensor, N: int) -> torch.Tensor:
    """RLOO: A_i = R_i - mean of the other N - 1 rewards of the group.  [B], groups of N in a row -> [B]"""
    group = R.view(-1, N)  # [B / N, N]
    return (group - (group.sum(1, keepdim=True) - group) / (N - 1)).flatten()


def remax_advantage(R: torch.Tensor, R_greedy: torch.Tensor) -> torch.Tensor:
    """ReMax: A = R - R(greedy decode of the same prompt).  [B], [B] -> [B]"""
    return R - R_greedy


def reinforce_advantage(R: torch.Tensor, b: float) -> torch.Tensor:
    """REINFORCE: A = R - b, one constant for all prompts.  [B] -> [B]"""
    return R - b


def clipped_surrogate(log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantage: torch.Tensor,
                      clip_range: float, dual_clip: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """min(r_t A, clip(r_t, 1 - eps, 1 + eps) A) for each token, to be maximised.  [N], [N], [N] -> three of [N]

    Returns the objective, the ratio r_t, and where the clip took the gradient away: r_t > 1 + eps with A > 0 (good
    tokens are not pushed up further), r_t < 1 - eps with A < 0 (bad ones not further down). At r_t = 1 the gradient is
    A grad log pi: REINFORCE with baseline V. dual_clip c > 1 stops A < 0 at r_t = c too (the paper's code, c = 3).
    """
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()  # r_t; the clamp keeps exp finite, far outside any clip
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_range, 1 + clip_range) * advantage)
    clipped = torch.where(advantage > 0, ratio > 1 + clip_range, ratio < 1 - clip_range) & (advantage != 0)
    if dual_clip:
        objective = torch.where(advantage < 0, torch.maximum(objective, dual_clip * advantage), objective)
        clipped |= (advantage < 0) & (ratio > dual_clip)
    return objective, ratio, clipped


# ----------------------------------------------------------------------------------------------------- 3. rollout


@dataclass
class Problem:
    text: str  # the prompt as the model sees it, template included
    ids: torch.Tensor  # [P] its tokens
    critic_ids: torch.Tensor  # [P'] the same in the critic's vocabulary
    gold: str  # the right answer


@dataclass
class Rollout:
    """One batch on its way through the loop: each function named here fills in its own fields, and no others."""

    problems: list[Problem]  # B contexts s_p
    responses: list[torch.Tensor] = None  # sample: B actions a, [T_i] tokens, the end token included
    texts: list[str] = None  # sample: the same, decoded
    cut: list[bool] = None  # sample: stopped by the length limit, not by an end token
    reward: torch.Tensor = None  # verify: R [B]
    reasons: list[str] = None  # verify: why R is what it is
    greedy_reward: torch.Tensor = None  # train, remax only: R of the greedy response [B]
    value: list[torch.Tensor] = None  # value: V at the last prompt token, B x [1]; token-level PPO: V_t, B x [T_i]
    advantage: list[torch.Tensor] = None  # advantage: A of each response token, B x [T_i]
    critic_target: list[torch.Tensor] = None  # advantage: what the critic is to learn, shaped like value
    old_log_probs: list[torch.Tensor] = None  # update: log pi_old(a_t | s_p, a_<t), B x [T_i]


class Policy(nn.Module):
    """pi_theta: a causal language model, asked for the log-probs of given tokens instead of a table of logits."""

    def __init__(self, lm: nn.Module, temperature: float):
        super().__init__()
        self.lm, self.temperature = lm, temperature

    def forward(self, ids: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor]):
        """Log-probs [N] and entropies [N] of the response tokens, which stand at `where` = (rows [N], columns [N]).

        ids [B, S] is padded on the right. Attention is causal, so no token sees the padding; positions count from 0.
        """
        rows, columns = where
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # [B, S]
        hidden = self.lm.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        before = hidden[rows, columns - 1]  # [N, D]: the state that token t was sampled from is that of token t - 1
        return token_log_probs(before, self.lm.get_output_embeddings(), ids[rows, columns], self.temperature)


def sample(ro: Rollout, policy: Policy, tok, cfg: Config, greedy: bool = False) -> None:
    """a ~ pi_old(. | s_p): one response for each prompt, from the policy's distribution and nothing else.

    No top-k, top-p or repetition penalty, whatever the checkpoint recommends: the ratio r_t is about pi, so pi is what
    must be sampled. Short answers do not wait for long ones: whenever half of the rows have ended, the others go on as
    a smaller batch (their beginnings are read again, which is one parallel pass).
    (tok.end_ids and tok.pad_id are ours: `build` works them out.)
    """
    width = max(len(p.ids) for p in ro.problems) + cfg.max_response_tokens if ro.problems else 1
    rows_at_once = max(1, cfg.sample_batch_tokens // width)
    responses = [torch.empty(0, dtype=torch.long) for _ in ro.problems]
    for first in range(0, len(ro.problems), rows_at_once):
        running = list(range(first, min(first + rows_at_once, len(ro.problems))))
        while running:
            begun = [torch.cat([ro.problems[i].ids, responses[i]]) for i in running]
            budget = cfg.max_response_tokens - len(responses[running[0]])  # all running rows are equally long
            for i, new in zip(running, generate(policy.lm, tok, begun, budget, cfg.temperature, greedy)):
                responses[i] = torch.cat([responses[i], new])
            running = [i for i in running if responses[i][-1].item() not in tok.end_ids
                       and len(responses[i]) < cfg.max_response_tokens]
    ro.responses = responses
    ro.cut = [r[-1].item() not in tok.end_ids for r in responses]
    ro.texts = [tok.decode(r, skip_special_tokens=True) for r in responses]


@torch.no_grad()
def generate(lm, tok, begun: list[torch.Tensor], budget: int, temperature: float, greedy: bool) -> list[torch.Tensor]:
    """One call of the model's own `generate`: at most `budget` new tokens after each row, stopping when half are done.

    Rows that end keep their first end token and lose what stands behind it (the lengths are counted, not read off the
    pad id: pad and end token may be the same).
    """
    from transformers import GenerationConfig, StoppingCriteriaList

    device, width = lm.device, max(map(len, begun))
    ids = pad_sequence(begun, True, tok.pad_id, padding_side="left")  # [B, width]
    mask = pad_sequence([torch.ones_like(seq) for seq in begun], True, 0, padding_side="left")  # [B, width]
    how = dict(do_sample=False) if greedy else dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
    settings = GenerationConfig(max_new_tokens=budget, eos_token_id=sorted(tok.end_ids), pad_token_id=tok.pad_id, **how)
    half_done = HalfDone(torch.tensor(sorted(tok.end_ids), device=device), width)
    with autocast(device):
        out = lm.generate(ids.to(device), attention_mask=mask.to(device), generation_config=settings,
                          stopping_criteria=StoppingCriteriaList([half_done]), synced_gpus=False)
    new = out[:, width:].cpu()  # [B, T]
    ended = torch.isin(new, torch.tensor(sorted(tok.end_ids)))  # [B, T]
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, new.shape[1])  # [B]
    return [row[:n] for row, n in zip(new, lengths.tolist())]


class HalfDone:
    """Stops `generate` for all rows once half of them have ended (looked at every 16 tokens, if at least 32 rows run)."""

    def __init__(self, end_ids: torch.Tensor, start: int):
        self.end_ids, self.start = end_ids, start

    def __call__(self, ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:  # ids [B, start + t] -> [B] bool
        rows, t = len(ids), ids.shape[1] - self.start
        stop = False
        if rows >= 32 and t % 16 == 0:
            ended = torch.isin(ids[:, self.start:], self.end_ids).any(1)  # [B]
            stop = bool(ended.sum() * 2 >= rows)
        return torch.full((rows,), stop, device=ids.device)


def verify(ro: Rollout) -> None:
    """R(s_p, a) in {0, 1}: is the answer in the last box the right one? A response that never ended earns 0."""
    # Some templates open the thinking part at the end of the prompt; unseen, a box in unfinished thinking would pay.
    opened = ["<think>" if p.text.rstrip().endswith("<think>") else "" for p in ro.problems]
    verdicts = verifier.grade([o + t for o, t in zip(opened, ro.texts)], [p.gold for p in ro.problems])
    ro.reasons = ["cut off" if cut else reason for cut, (_, reason) in zip(ro.cut, verdicts)]
    ro.reward = torch.tensor([0.0 if cut else R for cut, (R, _) in zip(ro.cut, verdicts)])  # R [B]


def critic_inputs(ro: Rollout, cfg: Config) -> tuple[list[torch.Tensor], list[int]]:
    """What the critic reads for each response, and at how many of its last positions it is asked for a value.

    SPPO: the prompt, once, at its last token. Token-level PPO: the state before each response token a_t, which ends at
    a_{t-1} (before a_1: at the last prompt token), so the last token itself is never read.
    """
    if cfg.algorithm == "ppo":
        return ([torch.cat([p.ids, a[:-1]]) for p, a in zip(ro.problems, ro.responses)], list(map(len, ro.responses)))
    return [p.critic_ids for p in ro.problems], [1] * len(ro.problems)


def lay_out(sequences: list[torch.Tensor], counts: list[int], device) -> tuple[torch.Tensor, tuple]:
    """Right-padded ids [B, S], and where = (rows [N], columns [N]) of the last counts[i] tokens of each sequence.

    No sequences at all (a process that has none left in this mini-batch, but has to take part): one dummy token, N = 0.
    """
    ids = pad_sequence(sequences or [torch.zeros(1, dtype=torch.long)], batch_first=True)  # [B, S]
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.long))  # [N]
    columns = [torch.arange(len(s) - n, len(s)) for s, n in zip(sequences, counts)]
    columns = torch.cat([torch.empty(0, dtype=torch.long), *columns])  # [N]
    return ids.to(device), (rows.to(device), columns.to(device))


def micro_batches(lengths: list[int], budget: int, rows: list[int] | None = None) -> list[list[int]]:
    """Split rows into groups of at most `budget` tokens, padding counted; similar lengths together, for little padding.

    A row longer than the budget is a group of its own. How rows are grouped changes speed and memory, never the result.
    """
    groups = []
    for i in sorted(range(len(lengths)) if rows is None else rows, key=lambda i: lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


@torch.no_grad()
def value(ro: Rollout, critic: Critic, cfg: Config) -> None:
    """V_phi(s_p) = sigmoid(v_phi(s_p)), before the critic has learned anything from this batch."""
    ro.value = [None] * len(ro.problems)
    sequences, counts = critic_inputs(ro, cfg)
    for rows in micro_batches(list(map(len, sequences)), cfg.micro_batch_tokens):
        ids, where = lay_out([sequences[i] for i in rows], [counts[i] for i in rows], critic.head.weight.device)
        with autocast(ids.device):
            v = critic(ids, where)  # [n]
        V = v if cfg.critic_loss == "mse" else v.sigmoid()  # [n]
        for i, V_i in zip(rows, V.cpu().split([counts[i] for i in rows])):
            ro.value[i] = V_i


def advantage(ro: Rollout, cfg: Config) -> None:
    """A for each response token, and what the critic is to learn: the one place where A differs by algorithm."""
    R = ro.reward  # [B]
    if cfg.algorithm == "ppo":
        ro.advantage = [gae_advantage(r, V, cfg.gamma, cfg.lam) for r, V in zip(R.tolist(), ro.value)]
        # mse: the lambda-return; bce: the reward itself, discounted to each token, as its target has to be in [0, 1]
        ro.critic_target = [r * cfg.gamma ** torch.arange(len(V) - 1.0, -1, -1) if cfg.critic_loss == "bce" else A + V
                            for r, V, A in zip(R.tolist(), ro.value, ro.advantage)]
        return
    if cfg.algorithm == "sppo":
        A = sppo_advantage(R, torch.cat(ro.value))
        ro.critic_target = list(R.split(1))  # B x [1]
    elif cfg.algorithm == "grpo":
        A = grpo_advantage(R, cfg.group_size)
    elif cfg.algorithm == "rloo":
        A = rloo_advantage(R, cfg.group_size)
    elif cfg.algorithm == "remax":
        A = remax_advantage(R, ro.greedy_reward)
    else:
        A = reinforce_advantage(R, cfg.baseline)
    ro.advantage = [A_i.expand(len(a)) for A_i, a in zip(A, ro.responses)]  # one number, broadcast to every token


# ------------------------------------------------------------------------------------------------------ 4. update


def pad_groups(groups: list[list[int]]) -> list[list[int]]:
    """The same, with empty groups added until every process has as many: each backward pass is a joint operation."""
    return groups + [[]] * (max(everyone(len(groups))) - len(groups))


def remember_old_log_probs(policy: Policy, ro: Rollout, cfg: Config, rows: list[int]) -> None:
    """log pi_old(a_t | s_p, a_<t) for the mini-batches after the first, by the same function as the update's.

    The first needs no extra pass: its new log-probs are its old ones, see `policy_step`. (The sampler's own numbers
    come from other kernels and differ in the last digits.)
    """
    lengths = [len(p.ids) + len(a) for p, a in zip(ro.problems, ro.responses)]
    with torch.no_grad():
        for group in micro_batches(lengths, cfg.micro_batch_tokens, rows) or [[]]:  # [[]]: see `update`
            log_probs, _ = policy_forward(policy, ro, group)
            for i, part in zip(group, log_probs.split([len(ro.responses[i]) for i in group])):
                ro.old_log_probs[i] = part


def policy_forward(policy: Policy, ro: Rollout, group: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [N] of the response tokens of these rows, laid end to end."""
    sequences = [torch.cat([ro.problems[i].ids, ro.responses[i]]) for i in group]
    ids, where = lay_out(sequences, [len(ro.responses[i]) for i in group], policy.lm.device)
    with autocast(ids.device):
        return policy(ids, where)


def critic_step(critic: Critic, optimizer, ro: Rollout, cfg: Config, rows: list[int], stats: Counter) -> None:
    """One step down L_V on these rows of the batch: the mean over the values asked for, on all processes."""
    sequences, counts = critic_inputs(ro, cfg)
    total = sum(everyone(sum(counts[i] for i in rows)))
    loss_of = value_loss if cfg.critic_loss == "bce" else lambda v, target: (v - target) ** 2 / 2
    for group in pad_groups(micro_batches(list(map(len, sequences)), cfg.micro_batch_tokens, rows)):
        ids, where = lay_out([sequences[i] for i in group], [counts[i] for i in group], critic.head.weight.device)
        with autocast(ids.device):
            v = critic(ids, where)  # [n]
        target = torch.cat([v.new_empty(0), *[ro.critic_target[i].to(v) for i in group]])  # [n]
        loss = loss_of(v, target).sum() / total
        (loss * world()).backward()  # FSDP takes the mean over the processes; `total` already counts them all
    optimizer_step(critic, optimizer, cfg, stats, "critic")


def policy_step(policy: Policy, optimizer, ro: Rollout, cfg: Config, rows: list[int], stats: Counter) -> None:
    """One step up J on these rows: the mean over ALL response tokens of the mini-batch, on all processes.

    The tokens are counted once, before it is split into micro-batches. A mean of the micro-batches' means would weigh a
    token of a short answer more than one of a long answer, by a factor that depends on the memory of the machine.
    """
    total = sum(everyone(sum(len(ro.responses[i]) for i in rows)))
    lengths = [len(p.ids) + len(a) for p, a in zip(ro.problems, ro.responses)]
    for group in pad_groups(micro_batches(lengths, cfg.micro_batch_tokens, rows)):
        log_probs, entropy = policy_forward(policy, ro, group)  # [N]
        sizes = [len(ro.responses[i]) for i in group]
        for i, new in zip(group, log_probs.detach().split(sizes)):
            if ro.old_log_probs[i] is None:  # before the first step the policy is pi_old: nothing to compute twice
                ro.old_log_probs[i] = new
        flat = lambda parts: torch.cat([log_probs.new_empty(0), *[parts[i].to(log_probs) for i in group]])  # [N]
        A, old = flat(ro.advantage), flat(ro.old_log_probs)
        objective, ratio, clipped = clipped_surrogate(log_probs, old, A, cfg.clip_range, cfg.dual_clip)
        loss = -objective.sum() / total
        (loss * world()).backward()
        if group:
            log_ratio = (log_probs - old).detach()
            stats["ratio"] += ratio.sum().item()
            stats["ratio_max"] = max(stats["ratio_max"], ratio.max().item())
            stats["clipped"] += clipped.sum().item()
            stats["kl"] += (ratio.detach() - 1 - log_ratio).sum().item()  # E[r - 1 - log r], an estimate of KL(old|new)
            stats["entropy"] += entropy.sum().item()
            stats["tokens"] += len(log_probs)
    optimizer_step(policy, optimizer, cfg, stats, "policy")


def optimizer_step(model: nn.Module, optimizer, cfg: Config, stats: Counter, name: str) -> None:
    """Clip the gradient's norm and step; a gradient that is not finite is dropped and counted, and moves nothing."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
    norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
    if math.isfinite(norm):
        optimizer.step()
        stats[f"{name}_norm"] += norm
        stats[f"{name}_steps"] += 1
    else:
        stats[f"{name}_skipped"] += 1
    optimizer.zero_grad(set_to_none=True)


def update(policy: Policy, critic: Critic | None, optimizers: dict, ro: Rollout, cfg: Config, step: int) -> Counter:
    """Mini-batch by mini-batch: one critic step on L_V, then one clipped policy step. Returns sums for the metrics.

    Two networks, and A is fixed by now: in which order they take turns makes no difference.
    """
    stats = Counter()
    # place[i]: which prompt of the whole batch row i belongs to; prompts were dealt to the processes in turn
    place = [i // cfg.copies * world() + rank() for i in range(len(ro.problems))]
    minis = [[i for i, k in enumerate(place) if first <= k < first + cfg.mini_batch_size]
             for first in range(0, cfg.batch_size, cfg.mini_batch_size)]
    ro.old_log_probs = [None] * len(ro.problems)
    policy_learns = critic is None or step > cfg.critic_warmup
    # Several processes do this even without rows: FSDP fetches weights ahead, in the order of earlier forward passes,
    # so every process must have run the same ones.
    if policy_learns and (len(minis) > 1 or world() > 1):
        with gathered(policy):
            remember_old_log_probs(policy, ro, cfg, sum(minis[1:], []))
    with recomputing(policy, critic, on=cfg.gradient_checkpointing):
        for rows in minis * cfg.epochs:
            if critic is not None:
                critic_step(critic, optimizers["critic"], ro, cfg, rows, stats)
            if policy_learns:
                policy_step(policy, optimizers["policy"], ro, cfg, rows, stats)
    return stats


# ----------------------------------------------------------------------------------------------- 5. training loop


def train(cfg: Config, policy: Policy, critic: Critic | None, optimizers: dict, tok, problems: list[Problem],
          eval_problems: list[Problem], out: Path, start: int) -> list[dict]:
    """The whole method, step by step: sample, verify, value, advantage, update. Returns all rows of metrics."""
    log, stop = Log(cfg, out, start), StopRequest()
    if start == 0:
        row = {"step": 0, **evaluate(policy, tok, eval_problems, cfg)}
        log.write(row)
        if critic is not None and cfg.critic_loss == "bce":  # V starts at the solve rate of the average prompt
            critic.start_at(row.get("eval/accuracy", row.get("eval/accuracy_greedy")))

    for step in range(start + 1, cfg.steps + 1):
        seed_everything(cfg.seed, step)
        set_rates(optimizers, cfg, step)
        clock, ro = Clock(), Rollout(batch_of(problems, cfg, step))
        with gathered(policy, critic):
            with clock("sample"):
                sample(ro, policy, tok, cfg)  # a ~ pi_old(. | s_p)
            with clock("verify"):
                verify(ro)  # R(s_p, a)
            if cfg.algorithm == "remax":
                with clock("sample"):
                    ro.greedy_reward = greedy_reward(ro, policy, tok, cfg)  # R(s_p, greedy a)
            if critic is not None:
                with clock("value"):
                    value(ro, critic, cfg)  # V_phi(s_p)
        advantage(ro, cfg)  # A = R - V_phi(s_p)
        with clock("update"):
            stats = update(policy, critic, optimizers, ro, cfg, step)  # critic: BCE; policy: clipped surrogate

        row = {"step": step, **metrics(ro, stats, clock)}
        if step % cfg.eval_every == 0 or step == cfg.steps:
            row |= evaluate(policy, tok, eval_problems, cfg)
        log.write(row, ro)
        stopping = max(everyone(stop.signum))
        if step % cfg.save_every == 0 or step == cfg.steps or stopping:
            save(cfg, out, step, policy, critic, optimizers, tok)
        log.check_health(row)
        if stopping:
            raise Stopped(stopping, f"stopped after step {step} and saved; go on with: python sppo.py --resume {out}")
    return log.rows


def set_rates(optimizers: dict, cfg: Config, step: int) -> None:
    scale = min(1.0, step / max(1, cfg.lr_warmup)) * (1 - (step - 1) / cfg.steps if cfg.lr_decay else 1)
    for name, optimizer in optimizers.items():
        lr = scale * (cfg.lr if name == "policy" else cfg.critic_lr)
        optimizer.param_groups[0].update(lr=lr, weight_decay=cfg.weight_decay)


def batch_of(problems: list[Problem], cfg: Config, step: int) -> list[Problem]:
    """This process's share of the batch of a step, each prompt group_size times where the algorithm wants groups.

    The data is an endless sequence of shuffles, one per epoch; step k takes the k-th batch of it. So the step number
    alone says where the data stands, and resuming needs nothing else.
    """
    places = range((step - 1) * cfg.batch_size, step * cfg.batch_size)[rank()::world()]
    orders = {e: torch.randperm(len(problems), generator=torch.Generator().manual_seed(cfg.seed * 100_003 + e)).tolist()
              for e in {k // len(problems) for k in places}}
    return [problems[orders[k // len(problems)][k % len(problems)]] for k in places for _ in range(cfg.copies)]


def greedy_reward(ro: Rollout, policy: Policy, tok, cfg: Config) -> torch.Tensor:
    """ReMax's baseline: the reward of the greedy response to each prompt, [B]."""
    greedy = Rollout(ro.problems)
    sample(greedy, policy, tok, cfg, greedy=True)
    verify(greedy)
    return greedy.reward


def metrics(ro: Rollout, stats: Counter, clock: "Clock") -> dict:
    """The row of metrics.jsonl for one step, over the batches of all processes. Each key is explained in the README."""
    A = torch.stack([a.mean() for a in ro.advantage]) if ro.advantage else torch.empty(0)
    V = torch.stack([V_i[0] for V_i in ro.value]) if ro.value else torch.empty(0)
    mine = [ro.reward.tolist(), V.tolist(), A.tolist(), [len(a) for a in ro.responses], ro.cut, ro.reasons]
    R, V, A, length, cut, reasons = (sum(parts, []) for parts in zip(*everyone(mine)))
    R, V, A = torch.tensor(R), torch.tensor(V), torch.tensor(A)
    all_stats = everyone(stats)
    stats = Counter({key: sum(s[key] for s in all_stats) for key in set().union(*all_stats)})
    ratio_max = max(s["ratio_max"] for s in all_stats)
    tokens, spread, mean_R = max(1, stats["tokens"]), R.var(correction=0), R.mean()
    entropy = lambda p: torch.special.entr(p) + torch.special.entr(1 - p)  # of a coin that shows 1 with probability p
    row = dict(reward=mean_R, value=None, advantage_std=A.std(correction=0))
    if len(V):
        p = V.clamp(1e-6, 1 - 1e-6)
        row |= dict(value=V.mean(), value_bce=-(R * p.log() + (1 - R) * (1 - p).log()).mean(),
                    value_bce_constant=entropy(mean_R), value_bce_floor=entropy(p).mean(),
                    explained_variance=1 - (R - V).var(correction=0) / spread if spread > 0 else None)
    row |= dict(ratio_mean=stats["ratio"] / tokens if stats["tokens"] else 1.0,
                ratio_max=ratio_max if stats["tokens"] else 1.0, clip_share=stats["clipped"] / tokens,
                kl=stats["kl"] / tokens, entropy=stats["entropy"] / tokens if stats["tokens"] else None,
                response_tokens=sum(length) / len(length), cut_share=sum(cut) / len(cut))
    for name in ("policy", "critic"):
        row[f"{name}_grad_norm"] = stats[f"{name}_norm"] / max(1, stats[f"{name}_steps"])
        row[f"{name}_skipped"] = round(stats[f"{name}_skipped"] / world())
    row |= {f"why/{reason.replace(' ', '_')}": n for reason, n in sorted(Counter(reasons).items())}
    row |= {f"seconds/{phase}": s for phase, s in clock.seconds.items()}
    row["tokens_per_second"] = sum(length) / max(1e-9, time.perf_counter() - clock.begin)
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in row.items()}


# -------------------------------------------------------------------------------------------------- 6. evaluation


def evaluate(policy: Policy, tok, problems: list[Problem], cfg: Config) -> dict:
    """Accuracy on held-out problems: avg@k at the training temperature, and greedy if asked for; each row once.

    It uses random numbers of its own, the same at every evaluation; training's are set anew at each step.
    """
    row, clock = {}, Clock()
    for name, k, greedy in (("accuracy", cfg.eval_samples, False), ("accuracy_greedy", int(cfg.eval_greedy), True)):
        if k == 0:
            continue
        seed_everything(cfg.seed, -1)
        mine = [i for i in range(len(problems)) for _ in range(k)][rank()::world()]
        ro = Rollout([problems[i] for i in mine])
        with clock("evaluate"), gathered(policy):
            sample(ro, policy, tok, cfg, greedy)
            verify(ro)
        scores = [[] for _ in problems]  # k rewards a problem
        for i, R in sum(everyone(list(zip(mine, ro.reward.tolist()))), []):
            scores[i].append(R)
        means = torch.tensor([sum(s) / len(s) for s in scores])
        row[f"eval/{name}"] = means.mean().item()
        row[f"eval/{name}_ci95"] = 1.96 * means.std(correction=0).item() / math.sqrt(len(means))
    return row | {"seconds/evaluate": clock.seconds["evaluate"]}


class Log:
    """What a person sees and what stays: the progress bar, decoded samples, metrics.jsonl. Only process 0 writes."""

    def __init__(self, cfg: Config, out: Path, start: int):
        self.cfg, self.path, self.rows, self.bad = cfg, out / "metrics.jsonl", [], 0
        if self.path.exists():  # rows written after the checkpoint belong to steps that are done again
            lines = self.path.read_text().splitlines()
            self.rows = [r for r in map(json.loads, filter(whole_json, lines)) if start and r["step"] <= start]
            if rank() == 0:
                replace_file(self.path, "".join(json.dumps(r) + "\n" for r in self.rows))
        self.bar = tqdm(total=cfg.steps, initial=start, desc="training", unit="step", disable=rank() > 0,
                        dynamic_ncols=True)

    def write(self, row: dict, ro: Rollout | None = None) -> None:
        self.rows.append(row)
        if rank() > 0:
            return
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        if "eval/accuracy" in row or "eval/accuracy_greedy" in row:
            self.bar.write(f"step {row['step']:>4}  " + describe_evaluation(row))
        if ro is None:
            return
        self.bar.update()
        critic = f"V {row['value']:.2f} ev {row['explained_variance'] or 0:.2f} " if row["value"] is not None else ""
        self.bar.set_postfix_str(f"R {row['reward']:.2f} {critic}kl {row['kl']:.4f} "
                                 f"{row['response_tokens']:.0f} tok/answer {row['tokens_per_second']:.0f} tok/s")
        if ro.problems and (row["step"] == 1 or row["step"] % self.cfg.show_every == 0):
            self.bar.write(describe_sample(ro, row["step"]))

    def check_health(self, row: dict) -> None:
        """Say so when nothing can be learned any more; end the run when nothing finite is left to learn from."""
        steps = [r for r in self.rows if "reward" in r]
        if len(steps) >= 5 and all(r["reward"] == row["reward"] for r in steps[-5:]) and row["reward"] in (0, 1):
            if row["step"] % 5 == 0:
                why = ", ".join(f"{k[4:]} {v}" for k, v in row.items() if k.startswith("why/"))
                cure = ("easier problems, a longer --max-response-tokens, an example in the prompt, or a stronger model"
                        if row["reward"] == 0 else "harder problems")
                say(f"note: every reward of the last 5 steps was {row['reward']:.0f} ({why}): nothing to learn from. "
                    f"Try {cure}.", self.bar)
        skipped = row["policy_skipped"] + row["critic_skipped"]
        lost = any(row[f"{m}_skipped"] and not row[f"{m}_grad_norm"] for m in ("policy", "critic"))
        self.bad = self.bad + 1 if lost else 0
        if skipped:
            say(f"note: step {row['step']}: {skipped} update(s) skipped, the gradient was not finite", self.bar)
        if self.bad == 3:
            self.bar.close()
            raise RunFailed("the gradients of 3 steps in a row were not finite: lower --lr or --critic-lr. The weights "
                            f"are those of the last finite update; checkpoints are in {self.path.parent}")


def describe_evaluation(row: dict) -> str:
    parts = [f"{label} {row[key]:.3f} ± {row[key + '_ci95']:.3f}" for label, key in
             (("sampled accuracy", "eval/accuracy"), ("greedy accuracy", "eval/accuracy_greedy")) if key in row]
    return ", ".join(parts)


def describe_sample(ro: Rollout, step: int) -> str:
    V = f"{ro.value[0][0].item():.2f}" if ro.value else "-"
    clip = lambda text: text if len(text) <= 600 else f"{text[:300]} [...] {text[-300:]}"
    return (f"--- step {step}, one sample ---\n{clip(ro.problems[0].text)}{clip(ro.texts[0])}\n"
            f"--- gold {ro.problems[0].gold}, R = {ro.reward[0].item():.0f} ({ro.reasons[0]}), V = {V}, "
            f"A = {ro.advantage[0][0].item():+.2f}")


def summarise(rows: list[dict], out: Path, cfg: Config) -> None:
    """The closing words of a run: accuracy before and after, where the time went, the curve, how to load the policy."""
    evaluated = [r for r in rows if "eval/accuracy" in r or "eval/accuracy_greedy" in r]
    say(f"\nbefore: {describe_evaluation(evaluated[0])}\nafter:  {describe_evaluation(evaluated[-1])}")
    phases = ("sample", "verify", "value", "update", "evaluate")
    spent = {phase: sum(r.get(f"seconds/{phase}", 0) for r in rows) for phase in phases}
    say("time:   " + ", ".join(f"{phase} {s:.0f} s ({100 * s / max(1e-9, sum(spent.values())):.0f} %)"
                               for phase, s in spent.items()))
    rewards = [r["reward"] for r in rows if "reward" in r]
    if rewards:
        width = math.ceil(len(rewards) / 60)
        means = [sum(part) / len(part) for part in (rewards[i:i + width] for i in range(0, len(rewards), width))]
        say("reward: " + "".join("▁▂▃▄▅▆▇█"[min(7, int(m * 8))] for m in means) + f"  (0 to 1, {width} step(s) a bar)")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        pass
    else:
        fig = Figure(figsize=(6, 3.5))
        ax = fig.subplots()
        ax.plot([r["step"] for r in rows if "reward" in r], rewards, alpha=0.5, label="reward of the batch")
        for key in ("eval/accuracy", "eval/accuracy_greedy"):
            ax.plot(*zip(*[(r["step"], r[key]) for r in evaluated if key in r] or [((), ())]), marker="o", label=key)
        ax.set(xlabel="step", ylabel="share right", ylim=(0, 1.02))
        ax.legend()
        fig.savefig(out / "curve.png", dpi=120, bbox_inches="tight")
        say(f"curve:  {out / 'curve.png'}")
    last = checkpoints(out)[-1]
    say(f"policy: {last}\n        AutoModelForCausalLM.from_pretrained({str(last)!r})")


# -------------------------------------------------------------------------------------------------------- 7. data


def load_problems(name: str, split: str, cfg: Config, tok, critic_tok) -> list[Problem]:
    """Read, check and tokenize a data set. Rows that cannot be used are dropped, and counted by reason."""
    kept, dropped = [], {}  # reason -> rows, for the report
    rows = read_rows(name, split)
    for column in filter(None, (cfg.prompt_column, cfg.answer_column)):
        if not any(pick(row, column) is not None for row in rows):
            first = next((row for row in rows if isinstance(row, dict)), {})
            raise UserError(f"{name}: no row has a column {column!r}; the first has {', '.join(map(str, first)) or 'none'}")
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, dict):
                raise ValueError("no columns")
            prompt, gold = read_prompt(row, cfg), verifier.read_gold(read_answer(row, cfg))
            text = render(prompt, tok, cfg.instruction)
            if any("\ud800" <= c <= "\udfff" for c in text + gold):
                raise ValueError("broken unicode (half of a character)")
            kept.append((number, text, gold,
                         render(prompt, critic_tok, cfg.instruction) if critic_tok is not tok else None))
        except ValueError as error:
            dropped.setdefault(str(error), []).append(number)
    all_ids, problems = encode([text for _, text, _, _ in kept], tok), []
    all_critic = encode([text for *_, text in kept], critic_tok) if critic_tok is not tok else all_ids
    for (number, text, gold, _), ids, critic_ids in zip(kept, all_ids, all_critic):
        if len(ids) <= cfg.max_prompt_tokens:
            problems.append(Problem(text, ids, critic_ids, gold))
        else:
            dropped.setdefault(f"longer than {cfg.max_prompt_tokens} prompt tokens", []).append(number)
    why = "; ".join(f"{len(n)} {reason.splitlines()[0][:80]}, e.g. row {n[0]}" for reason, n in dropped.items())
    say(f"data: {name}: {len(rows)} rows, {len(problems)} kept" + (f", {len(rows) - len(problems)} dropped ({why})"
                                                                 if why else ""))
    if not problems:
        raise UserError(f"{name}: none of its {len(rows)} rows can be used ({why})")
    return problems


def read_rows(name: str, split: str) -> list[dict]:
    """The rows of a local file as they lie, or of a hub data set NAME[:CONFIG[:SPLIT]]."""
    path, kind = Path(name).expanduser(), Path(name).suffix.lower()
    if on_hub(name):
        return read_hub(name, split)
    try:
        if kind == ".jsonl":
            rows = [json.loads(line) for line in path.read_text("utf-8-sig").split("\n") if line.strip()]
        elif kind == ".json":
            rows = json.loads(path.read_text("utf-8-sig"))
            rows = rows if isinstance(rows, list) else next((v for v in rows.values() if isinstance(v, list)), [])
        elif kind == ".csv":
            csv.field_size_limit(2**30)
            with open(path, newline="", encoding="utf-8-sig") as file:
                rows = list(csv.DictReader(file))
        elif kind == ".parquet":
            import pyarrow.parquet  # comes with `datasets`
            rows = pyarrow.parquet.read_table(path).to_pylist()
        else:
            raise UserError(f"{name}: not a .jsonl, .json, .csv or .parquet file")
    except (OSError, ValueError, AttributeError, csv.Error) as error:
        raise UserError(f"{name}: cannot be read: {first_line(error)}") from None
    if not rows:
        raise UserError(f"{name}: no rows in it")
    return rows


def look_for_sources(cfg: Config) -> None:
    """What can be known to be missing before anything loads.

    Without a network the hub's library tries again for a minute: so ask here, once, before it is imported, and put
    it into offline mode if nothing answers.
    """
    sets = [name for name in (cfg.dataset, cfg.eval_dataset) if name]
    for name in sets:
        if not on_hub(name) and not Path(name).expanduser().is_file():
            raise UserError(f"{name}: no such file")
    if any(map(on_hub, sets)) or not all(Path(resolve(m)).is_dir() for m in (cfg.model, cfg.critic_model or cfg.model)):
        try:
            urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5).close()
        except urllib.error.HTTPError:
            pass  # an answer, whatever it says
        except OSError:
            os.environ["HF_HUB_OFFLINE"] = "1"


def on_hub(name: str) -> bool:
    return Path(name).suffix.lower() not in (".jsonl", ".json", ".csv", ".parquet") and not Path(name).exists()


def read_hub(name: str, split: str) -> list[dict]:
    known = {"gsm8k": "openai/gsm8k:main", "openai/gsm8k": "openai/gsm8k:main"}
    hub, config, wanted = (known.get(name, name).split(":") + ["", ""])[:3]
    import datasets
    try:
        rows = datasets.load_dataset(hub, config or None, split=wanted or split).to_list()
    except Exception as error:  # the hub's library raises dozens of kinds; each becomes one line
        raise UserError(f"--dataset {name}: no such file here, and not to be had from the hub: "
                        f"{first_line(error)}") from None
    if not rows:
        raise UserError(f"{name}: no rows in it")
    return rows


def pick(row: dict, column: str):
    """row["a"]["b"] for the column "a.b"; None where it is missing."""
    if isinstance(row, dict) and column in row:
        return row[column]
    for part in column.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def first_filled(row: dict, columns: tuple[str, ...]):
    """The first of these columns that has something in it: neither None nor blank, and no NaN or infinity."""
    empty = lambda x: not x.strip() if isinstance(x, str) else x is None or isinstance(x, float) and not math.isfinite(x)
    return next((x for x in (pick(row, c) for c in columns) if not empty(x)), None)


def read_prompt(row: dict, cfg: Config) -> str | list[dict]:
    """A text, or a list of chat turns (which may hold worked examples and must end with the user's)."""
    columns = (cfg.prompt_column,) if cfg.prompt_column else ("question", "problem", "prompt")
    prompt = first_filled(row, columns)
    if prompt is None and not cfg.prompt_column and row.get("Question") is not None:  # SVAMP
        prompt = " ".join(str(row[c]).strip() for c in ("Body", "Question") if row.get(c))
    if isinstance(prompt, list):
        if not prompt or not all(isinstance(t, dict) and isinstance(t.get("content"), str) and t.get("role") in
                                 ("system", "user", "assistant") for t in prompt) or prompt[-1]["role"] != "user":
            raise ValueError("prompt is no list of chat turns ending with the user's")
        return prompt
    if prompt is None or isinstance(prompt, (dict, bool)):
        raise ValueError("empty prompt")
    return str(prompt)


def read_answer(row: dict, cfg: Config):
    columns = (cfg.answer_column,) if cfg.answer_column else ("answer", "Answer", "reward_model.ground_truth")
    return first_filled(row, columns)


def render(prompt: str | list[dict], tok, instruction: str) -> str:
    """The text the model sees: its chat template where the tokenizer has one, else the plain prompt and a newline."""
    turns = [dict(t) for t in prompt] if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if instruction and not any("\\boxed" in t["content"] for t in turns):
        turns[-1]["content"] += "\n" + instruction
    if not tok.chat_template:
        return "\n".join(t["content"] for t in turns) + "\n"
    try:
        return tok.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception:  # some templates refuse a system turn: it moves into the user's first
        if turns[0]["role"] != "system" or len(turns) < 2:
            raise ValueError("the chat template refuses this prompt") from None
    turns[1]["content"] = turns[0]["content"] + "\n" + turns[1]["content"]
    return render(turns[1:], tok, "")


def encode(texts: list[str], tok) -> list[torch.Tensor]:
    """Token ids [P] of each text, with one BOS where the tokenizer uses one, whether the template wrote it or not."""
    begin = [tok.bos_token_id] if tok("1").input_ids[:1] == [tok.bos_token_id] else []
    rows = tok(texts, add_special_tokens=False).input_ids if texts else []
    return [torch.tensor(ids if ids[:1] == begin else begin + ids) for ids in rows]


def split_problems(cfg: Config, tok, critic_tok) -> tuple[list[Problem], list[Problem]]:
    """Training and evaluation problems, none in both. Without an evaluation set of its own, a tenth is held out."""
    problems = load_problems(cfg.dataset, "train", cfg, tok, critic_tok)
    rows = len(problems)
    if cfg.eval_dataset or on_hub(cfg.dataset):
        hub = ":".join(cfg.dataset.split(":")[:2])  # NAME:CONFIG, without the split to train on
        held = load_problems(cfg.eval_dataset or hub, "test", cfg, tok, critic_tok)
        order = torch.randperm(len(held), generator=torch.Generator().manual_seed(0)).tolist()
        held, name = [held[i] for i in order[: cfg.eval_size]], cfg.eval_dataset or f"{hub}, test split"
    else:
        problems = list({p.text: p for p in problems}.values())
        order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(0)).tolist()
        count = max(1, min(cfg.eval_size, len(problems) // 10))
        held, name = [problems[i] for i in order[:count]], f"{cfg.dataset}, held out"
    texts = {p.text for p in held}
    rest = [p for p in problems if p.text not in texts]
    if not rest and not cfg.eval_only:
        raise UserError(f"{cfg.dataset}: no problem is left to train on after {len(held)} are kept for evaluation")
    say(f"evaluation: {len(held)} problems ({name}); training: {len(rest)}, none of them in it "
        f"({rows - len(rest)} held out or repeated)")
    return rest, held


# ------------------------------------------------------------------------------------------------------ 8. models


def resolve(name: str) -> str:
    """A local folder as it is; a bare name gets its organisation; anything else is taken for a hub id."""
    owners = {"Qwen": "Qwen", "DeepSeek": "deepseek-ai", "SmolLM": "HuggingFaceTB", "Llama-": "meta-llama"}
    for path in (Path(name).expanduser(), HERE / name):
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise UserError(f"--model {name}: this folder has no config.json, so it is no Hugging Face model")
            return str(path)
    owner = next((o for begin, o in owners.items() if name.startswith(begin)), None)
    if "/" not in name and owner:
        return f"{owner}/{name}"
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"--model {name}: no such folder, and no name of a model on the hub (OWNER/NAME)")
    return name


def load_tokenizer(name: str, cfg: Config):
    """The tokenizer, checked: what it encodes must be what the folder's own tokenizer.json says, and decode again."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file
    source, probe = resolve(name), "12+7=19 and so \\boxed{19}."
    try:
        tok = AutoTokenizer.from_pretrained(source, trust_remote_code=cfg.trust_remote_code)
        file = cached_file(source, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
        right = Tokenizer.from_file(file).encode(probe, add_special_tokens=False).ids if file else plain_ids(tok, probe)
    except Exception as error:  # OSError, ValueError, KeyError, ImportError, ...: one line each
        raise UserError(f"{name}: no usable tokenizer: {first_line(error)}") from None
    if right != plain_ids(tok, probe):
        say(f"tokenizer: this transformers release rebuilds it wrongly; using {name}'s own tokenizer.json")
        template = tok.chat_template
        tok = PreTrainedTokenizerFast(tokenizer_file=file, **tok.special_tokens_map)
        tok.chat_template = template
    if "".join(tok.decode(plain_ids(tok, "12+7=19")).split()) != "12+7=19":
        raise UserError(f"{name}: its tokenizer does not give back what it encodes; the files do not belong together")
    return tok


def plain_ids(tok, text: str) -> list[int]:
    return tok(text, add_special_tokens=False).input_ids


def find_end_ids(tok, lm) -> set[int]:
    """Every token that ends a response: the checkpoint's, the tokenizer's, and what closes a turn in its template."""
    ends = set()
    for ids in (lm.generation_config.eos_token_id, lm.config.get_text_config().eos_token_id, tok.eos_token_id):
        ends |= set(ids) if isinstance(ids, (list, tuple)) else {ids} - {None}
    if tok.chat_template:
        turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "ANSWER"}]
        try:
            after = plain_ids(tok, tok.apply_chat_template(turns, tokenize=False).rpartition("ANSWER")[2])
        except Exception as error:  # a template may raise what it likes
            raise UserError(f"the chat template cannot write a user's and an answer's turn: {first_line(error)}") from None
        ends |= set(after[:1]) & set(tok.all_special_ids + list(tok.added_tokens_decoder))
    if not ends:
        raise UserError("neither the model nor its tokenizer names an end token: set eos_token_id in its config.json")
    return ends


def load(auto_class, name: str, cfg: Config) -> nn.Module:
    """Weights in float32 (updates of 1e-6 would round away in bfloat16), from safetensors alone, dropout off (eval)."""
    try:
        model = auto_class.from_pretrained(resolve(name), dtype=torch.float32, use_safetensors=True,
                                           trust_remote_code=cfg.trust_remote_code).eval()
    except Exception as error:
        raise UserError(f"{name}: cannot be loaded: {first_line(error)}") from None
    for module in model.modules():  # no dropout, even where `recomputing` puts layers into training mode
        vars(module).update({key: 0.0 for key, rate in vars(module).items() if "drop" in key and type(rate) is float})
    return model


def build(cfg: Config):
    """Policy, critic (or None), tokenizer, and the critic's tokenizer (the same object where it does not differ)."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.utils import logging
    logging.set_verbosity_error()  # its advice is for its own trainer
    logging.disable_progress_bar()
    tok = load_tokenizer(cfg.model, cfg)
    lm = load(AutoModelForCausalLM, cfg.model, cfg)
    if cfg.device == "cpu" and lm.num_parameters() < 2_000_000:
        torch.set_num_threads(1)  # waking a second thread costs more than such small matrices gain from it
    tok.end_ids = find_end_ids(tok, lm)
    tok.pad_id = tok.pad_token_id if tok.pad_token_id is not None else min(tok.end_ids)
    check_vocabulary(tok, lm, cfg.model)
    if not tok.chat_template:
        say("tokenizer: no chat template, so prompts are plain text")
    policy, critic, critic_tok = Policy(lm, cfg.temperature), None, tok
    check_head(policy, tok)
    lm.saved_dtype = AutoConfig.from_pretrained(resolve(cfg.model), trust_remote_code=cfg.trust_remote_code).dtype
    # What the checkpoint recommends for sampling is kept for saving, and out of the way of training.
    lm.saved_generation_config, lm.generation_config = lm.generation_config, type(lm.generation_config)()
    if cfg.algorithm in ("sppo", "ppo"):
        name = cfg.critic_model or cfg.model
        other = load_tokenizer(name, cfg) if name != cfg.model else tok
        critic_tok = tok if other.get_vocab() == tok.get_vocab() and other.chat_template == tok.chat_template else other
        if cfg.algorithm == "ppo" and critic_tok is not tok:
            raise UserError("--algorithm ppo values each response token: its critic needs the policy's tokenizer")
        backbone = load(AutoModel, name, cfg)
        check_vocabulary(critic_tok, backbone, name)
        try:
            critic = Critic(keep_first_layers(backbone, cfg.critic_layers) if cfg.critic_layers else backbone).eval()
        except ValueError as error:
            raise UserError(str(error)) from None
    for model in filter(None, (lm, critic and critic.backbone)):
        if cfg.gradient_checkpointing:
            old_name = model.gradient_checkpointing_enable  # in older releases of transformers
            getattr(model, "activation_checkpointing_enable", old_name)({"use_reentrant": False})
    policy, critic = (shard(m, cfg) for m in (policy, critic))
    return policy, critic, tok, critic_tok


def check_lengths(cfg: Config, policy: Policy, critic: Critic | None, problems: list[Problem]) -> None:
    """The longest prompt, and a whole response after it, have to fit the positions that a model was made for."""
    needs = [(policy.lm, max(len(p.ids) for p in problems) + cfg.max_response_tokens)]
    if critic is not None:
        needs.append((critic.backbone, max(len(p.critic_ids) for p in problems)))
    for model, tokens in needs:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit and tokens > limit:
            raise UserError(f"{tokens} tokens, but {model.config.model_type} has {limit} positions: lower "
                            "--max-response-tokens or --max-prompt-tokens")


def check_vocabulary(tok, model: nn.Module, name: str) -> None:
    if max(tok.get_vocab().values()) >= model.get_input_embeddings().weight.shape[0]:
        raise UserError(f"{name}: the tokenizer has ids that the model has no embedding for: they do not fit together")


@torch.no_grad()
def check_head(policy: Policy, tok) -> None:
    """Models may change their logits after the head (soft caps, scales): what is scored is then not what is sampled."""
    ids = torch.tensor([plain_ids(tok, "12+7=19")])  # [1, S]
    theirs = policy.lm(ids, use_cache=False).logits[0, -2].div(policy.temperature).log_softmax(-1)[ids[0, -1]]
    ours = policy(ids, (torch.tensor([0]), torch.tensor([ids.shape[1] - 1])))[0][0]
    if not torch.allclose(theirs, ours, atol=1e-3):
        raise UserError("this model changes its logits after the language-model head, which is not supported here")


def make_optimizers(cfg: Config, policy: Policy, critic: Critic | None) -> dict:
    models = {"policy": policy} | ({"critic": critic} if critic is not None else {})
    how = dict(lr=0.0, weight_decay=cfg.weight_decay, fused=True)  # `train` sets the rate of each step
    return {name: torch.optim.AdamW(model.parameters(), **how) for name, model in models.items()}


# ------------------------------------------------------------------------------------- 9. processes and precision


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def join_processes(cfg: Config) -> None:
    """Under torchrun: one GPU for each process of a machine, and a group of all processes."""
    if "RANK" in os.environ:
        if cfg.device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cfg.device.startswith("cuda") else "gloo",
                                timeout=timedelta(hours=4))  # one process may sample, or save, much longer than another


def everyone(mine) -> list:
    """[of process 0, of process 1, ...]: what each process passed."""
    if world() == 1:
        return [mine]
    parts = [None] * world()
    dist.all_gather_object(parts, mine)
    return parts


def say(text: str, bar=None) -> None:
    if rank() == 0:
        (bar or tqdm).write(text)


def shard(model: nn.Module | None, cfg: Config) -> nn.Module | None:
    """One process: the model as it is. Several: weights, gradients and optimizer state cut in equal parts (FSDP2),
    float32 where they are kept and where gradients are added up, bfloat16 where a GPU computes."""
    device = torch.device(cfg.device)
    if model is None or world() == 1:
        return model if model is None else model.to(device)
    mesh = dist.init_device_mesh(device.type, (world(),))
    how = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
               if device.type == "cuda" else MixedPrecisionPolicy())
    body = model.lm.base_model if isinstance(model, Policy) else model.backbone
    for layer in decoder_layers(body, body.config.get_text_config().num_hidden_layers):
        fully_shard(layer, **how)
    fully_shard(model, **how)
    with torch.no_grad():  # FSDP wants its first forward pass to go through the outermost module
        token = torch.zeros(1, 2, dtype=torch.long, device=device)
        model(token, (torch.tensor([0], device=device), torch.tensor([1], device=device)))
    model.reshard()  # the outermost module stays gathered after a forward pass
    return model


@contextmanager
def gathered(*models: nn.Module | None):
    """Whole weights on every process while they sample and score, so that no one waits for anyone's longest answer."""
    units = [m for model in models if model is not None for m in model.modules() if isinstance(m, FSDPModule)]
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


@contextmanager
def recomputing(*models: nn.Module | None, on: bool):
    """Gradient checkpointing for the update alone; outside this block sampling keeps its KV cache.

    transformers ties it to training mode. That is set on the layers themselves, not on what is in them, so dropout
    stays off (`load` sees to the layers' own).
    """
    modules = [m for model in models if model is not None and on for m in model.modules()]
    layers = [m for m in modules if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def autocast(device: torch.device):
    """bfloat16 matrix products over float32 weights on a GPU; plain float32 elsewhere (a CPU's bfloat16 can crawl)."""
    return torch.autocast("cuda", torch.bfloat16) if torch.device(device).type == "cuda" else nullcontext()


def seed_everything(seed: int, step: int) -> None:
    """All randomness of a step comes from (seed, step, process): resuming needs no saved state, and evaluating, which
    seeds itself, cannot shift training's numbers."""
    mixed = ((seed * 1_000_003 + step + 1) * 10_007 + rank()) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


class Clock:
    """Seconds spent in each phase of a step."""

    def __init__(self):
        self.begin, self.seconds = time.perf_counter(), Counter()

    @contextmanager
    def __call__(self, phase: str):
        begin = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - begin


# ------------------------------------------------------------------------------------ 10. checkpoints and signals


def save(cfg: Config, out: Path, step: int, policy: Policy, critic: Critic | None, optimizers: dict, tok) -> None:
    """checkpoint-STEP/: the policy as an ordinary Hugging Face folder in its own dtype, and training.pt to go on from.

    Written under another name, flushed, then renamed: a folder with the right name is whole. Older ones go afterwards.
    """
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    models = {"policy": policy} | ({"critic": critic} if critic is not None else {})
    state = {"step": step, "models": {k: get_model_state_dict(m, options=whole) for k, m in models.items()},
             "optimizers": {k: get_optimizer_state_dict(models[k], o, options=whole) if o.state else None
                            for k, o in optimizers.items()}}
    if rank() == 0:
        for name, weights in state["models"].items():
            if not all(w.isfinite().all() for w in weights.values()):
                raise RunFailed(f"the {name}'s weights are not finite after step {step}: nothing was saved")
        final, lm = out / f"checkpoint-{step:06d}", policy.lm
        folder = out / f".{final.name}.tmp"
        shutil.rmtree(folder, ignore_errors=True)
        own = {name for name, _ in lm.named_parameters()} | {name for name, _ in lm.named_buffers()}  # tied head: once
        weights = {k.removeprefix("lm."): w for k, w in state["models"]["policy"].items()}
        lm.save_pretrained(folder, state_dict={k: w.to(lm.saved_dtype) for k, w in weights.items() if k in own})
        lm.config.dtype = lm.saved_dtype  # save_pretrained has put float32 there
        lm.config.save_pretrained(folder)
        lm.saved_generation_config.to_json_file(folder / "generation_config.json")
        tok.save_pretrained(folder)
        torch.save(state, folder / "training.pt")
        sizes = {f.name: f.stat().st_size for f in folder.iterdir()}
        (folder / "whole.json").write_text(json.dumps({"step": step, "bytes": sizes}))
        for file in [*folder.iterdir(), folder]:
            flush(file)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(folder, final)
        flush(out)
        found = checkpoints(out)
        older = found[:found.index(final)][::-1]  # the newest first; those after `final` were broken when we resumed
        for folder in set(found) - {final, *older[:cfg.keep - 1]}:
            shutil.rmtree(folder)
    everyone(None)  # wait for process 0


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    flush(temporary)
    os.replace(temporary, path)


def checkpoints(out: Path) -> list[Path]:
    """The run's checkpoints, the oldest first; a checkpoint-best that somebody made is none of them."""
    found = [p for p in out.glob("checkpoint-*") if p.is_dir() and p.name[11:].isdigit()]
    return sorted(found, key=lambda p: int(p.name[11:]))


def newest_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint whose files all have the size they were written with; others are named and passed over."""
    for folder in reversed(checkpoints(out)):
        try:
            sizes = json.loads((folder / "whole.json").read_text())["bytes"]
            broken = [name for name, size in sizes.items() if (folder / name).stat().st_size != size]
        except (OSError, ValueError, KeyError):
            broken = ["whole.json"]
        if not broken:
            return folder
        say(f"resume: {folder} is incomplete ({', '.join(broken)}); trying the one before")
    if checkpoints(out):
        raise UserError(f"--resume {out}: no whole checkpoint in it")
    say(f"resume: {out} has no checkpoint yet; from the beginning")


def restore(folder: Path, models: dict, optimizers: dict) -> int:
    """Weights and optimizer states of policy and critic, onto any number of processes. Returns the step they are of."""
    state, whole = torch.load(folder / "training.pt", weights_only=True, mmap=True), StateDictOptions(full_state_dict=True)
    if state["models"].keys() != models.keys():
        raise UserError(f"{folder} holds {' and '.join(state['models'])}, not {' and '.join(models)}: its --algorithm "
                        "is another")
    for name, model in models.items():
        try:
            set_model_state_dict(model, state["models"][name], options=whole)
        except RuntimeError as error:
            raise UserError(f"{folder} does not fit this {name}: {first_line(error)}") from None
        if state["optimizers"][name] is not None:
            set_optimizer_state_dict(model, optimizers[name], state["optimizers"][name], options=whole)
    say(f"resume: {folder}, step {state['step']}")
    return state["step"]


class Stopped(Exception):
    """A signal ended the run; args: signal number, message."""


class RunFailed(Exception):
    """The run cannot go on; printed as one line, exit code 1."""


class StopRequest:
    """Ctrl-C or TERM: the step is finished and saved, then the run ends. A second one ends a single process at once."""

    def __init__(self):
        self.signum = 0
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.handle)

    def handle(self, signum, frame):
        self.signum = signum
        for again in (signal.SIGINT, signal.SIGTERM):  # torchrun passes the terminal's Ctrl-C on a second time
            signal.signal(again, signal.SIG_DFL if world() == 1 else signal.SIG_IGN)
        if rank() == 0:  # not `print`: the signal may have come in the middle of one
            os.write(2, b"\nstopping after this step" + b" (once more: at once)" * (world() == 1) + b"\n")


# ------------------------------------------------------------------------------------------------ 11. command line


def parse(argv: list[str]) -> Config:
    """Settings in rising order: defaults, the recipe of the model's name, the resumed run's own, the flags given."""
    parser = argparse.ArgumentParser(prog="sppo.py", description="Sequence-Level PPO (arXiv 2604.08865)",
                                     argument_default=argparse.SUPPRESS)
    for f in dataclasses.fields(Config):
        name, choices = "--" + f.name.replace("_", "-"), f.metadata["choices"]
        how = dict(help=f"{f.metadata['help']} [{f.default}]".replace("%", "%%"))
        if f.type is bool:
            how |= dict(action=argparse.BooleanOptionalAction)
        else:
            how |= dict(type=f.type, choices=choices, metavar=None if choices else f.type.__name__.upper())
        parser.add_argument(name, **how)
    given = vars(parser.parse_args(argv))
    saved = {}
    if "resume" in given:
        if given.get("out", given["resume"]) != given["resume"]:
            raise UserError("--resume goes on in the run's own folder: leave --out away")
        file = Path(given["resume"]) / "config.json"
        if not file.is_file() or not file.stat().st_size:
            raise UserError(f"--resume {given['resume']}: no run there (no config.json)")
        saved = json.loads(file.read_text()) | {"out": given["resume"]}
        if not saved.keys() <= {f.name for f in dataclasses.fields(Config)}:
            raise UserError(f"--resume {given['resume']}: not a run's folder (it is the one that holds checkpoint-*)")
    model = given.get("model", saved.get("model", Config.model))
    recipe = next((r for name, r in RECIPES.items() if model.rstrip("/").removesuffix("-Instruct").endswith(name)), {})
    cfg = Config(**{**recipe, **saved, **given})
    if cfg.critic_warmup >= cfg.steps and "critic_warmup" not in saved | given:
        cfg.critic_warmup = cfg.steps // 4  # a recipe's warm-up must leave the policy something
    cfg.check()
    cfg.device = cfg.device or ("cuda" if torch.cuda.is_available() else
                                "mps" if torch.backends.mps.is_available() else "cpu")
    if cfg.device.split(":")[0] not in ("cuda", "mps", "cpu") or (cfg.device[:4] == "cuda" and
                                                                  not torch.cuda.is_available()):
        raise UserError(f"--device {cfg.device}: not available here")
    cfg.micro_batch_tokens = cfg.micro_batch_tokens or (8192 if cfg.device == "cpu" else 16384)
    return cfg


def choose_folder(cfg: Config) -> Path:
    """The run's folder. One that has a run in it is refused unless that run is resumed."""
    name = Path(cfg.model).parent.name if Path(cfg.model).name == "model" else Path(cfg.model).name
    name = f"{name}-{cfg.algorithm}-seed{cfg.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = Path(everyone(cfg.out or f"runs/{name}")[0])
    if not cfg.resume and (out / "config.json").exists():
        raise UserError(f"--out {out}: there is a run in this folder; choose another, or go on with it: --resume {out}")
    return out


def begin_folder(cfg: Config, out: Path) -> None:
    """Writes config.json, once everything that the run needs has loaded: a mistyped name leaves nothing behind."""
    everyone(None)  # every process has looked into the folder before process 0 writes
    if rank() == 0:
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / "config.json").touch(exist_ok=bool(cfg.resume))  # another run may have begun here while we loaded
            settings = dataclasses.asdict(cfg) | {"resume": "", "eval_only": False}
            replace_file(out / "config.json", json.dumps(settings, indent=1))
        except OSError as error:
            raise UserError(f"--out {out}: {error.strerror}") from None


def run(argv: list[str]) -> None:
    cfg = parse(argv)
    look_for_sources(cfg)
    if cfg.plan:
        sys.path.insert(0, str(HERE / "tests"))
        from memory_plan import print_plan
        return print_plan(cfg)
    try:
        verifier.start()  # its helper process has to be there before CUDA is
    except RuntimeError as error:
        raise UserError(str(error)) from None
    join_processes(cfg)
    out = choose_folder(cfg)
    folder = newest_checkpoint(out) if cfg.resume else None
    say(f"{cfg.algorithm} on {cfg.model}, {world()} process(es) on {cfg.device}; folder {out}")
    policy, critic, tok, critic_tok = build(cfg)
    problems, eval_problems = split_problems(cfg, tok, critic_tok)
    check_lengths(cfg, policy, critic, problems + eval_problems)
    if len(problems) < cfg.batch_size:
        say(f"note: {len(problems)} problems for batches of {cfg.batch_size}: a batch is now all of them")
        cfg.batch_size = max(1, len(problems))
    if cfg.batch_size < world() and not cfg.eval_only:
        raise UserError(f"--batch-size {cfg.batch_size} for {world()} processes: each needs a prompt at least")
    optimizers = make_optimizers(cfg, policy, critic)
    models = {"policy": policy} | ({"critic": critic} if critic is not None else {})
    start = restore(folder, models, optimizers) if folder else 0
    if cfg.eval_only and cfg.resume:  # a look at the newest checkpoint; the run's files stay as they are
        return say(describe_evaluation(evaluate(policy, tok, eval_problems, cfg)))
    if start >= cfg.steps:
        raise UserError(f"--resume {out}: all {cfg.steps} steps are done; give a larger --steps to go on")
    begin_folder(cfg, out)
    if cfg.eval_only:
        return Log(cfg, out, 0).write({"step": 0, **evaluate(policy, tok, eval_problems, cfg)})
    say(f"a step: {cfg.batch_size} prompts, {math.ceil(cfg.batch_size / cfg.mini_batch_size)} mini-batches; {cfg.steps} steps"
        + (f", the first {cfg.critic_warmup} for the critic alone" if critic is not None and cfg.critic_warmup else ""))
    rows = train(cfg, policy, critic, optimizers, tok, problems, eval_problems, out, start)
    if rank() == 0:
        summarise(rows, out, cfg)


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


def whole_json(line: str) -> bool:
    try:
        return bool(json.loads(line))
    except ValueError:
        return False


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the run failed, 2 bad input, 130/143 stopped by a signal."""
    code = 0
    try:
        run(sys.argv[1:] if argv is None else argv)
    except (UserError, RunFailed) as error:
        tqdm.write(f"sppo.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except torch.OutOfMemoryError as error:
        tqdm.write("sppo.py: out of GPU memory: lower --sample-batch-tokens (while sampling) or --micro-batch-tokens (in "
                   f"the update), or set --gradient-checkpointing or --critic-layers ({first_line(error)})", sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("stopped before the first step; nothing to save")
        return 128 + signal.SIGINT
    except Stopped as stopped:
        signum, message = stopped.args
        say(message)
        code = 128 + signum
    finally:
        verifier.stop()
    if dist.is_initialized():  # on the two ways that all processes take; after an error of one, it would wait for them
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
