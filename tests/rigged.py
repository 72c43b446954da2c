"""Tiny models for the tests: random ones with awkward folders, and rigged ones whose every probability is known.

A rigged model is a Markov chain in the shape of a Llama: P(next token | last token) is a table of our choice. Its
embeddings are unit vectors, attention and MLP add nothing to them, the final norm gives the unit vector back, and the
head holds log-probabilities. So rewards, lengths, entropies and log-probs of what it writes can be worked out by hand.
"""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import sppo

TOY = sppo.HERE / "toy/model"
PAD, END, ZERO, EQUALS, NEWLINE, BOX, CLOSE = 0, 1, 2, 14, 15, 16, 17  # ids of the toy's tokenizer; digit d is ZERO + d
NASTY = dict(do_sample=True, temperature=0.3, top_k=2, top_p=0.5, repetition_penalty=1.5)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}="


def write_model(path: Path, table: torch.Tensor | None = None, *, width: int = 32, layers: int = 2, vocab: int = 18,
                dropout: float = 0.0, nasty: bool = False, pad_is_end: bool = False, ends: int | list[int] = END,
                bf16: bool = False, tied: bool = False, template: bool = False) -> str:
    """A Hugging Face folder: random weights, or a rigged model if there is a table [V, V] of P(next | last)."""
    tok = AutoTokenizer.from_pretrained(TOY)
    if pad_is_end:
        tok.pad_token = tok.eos_token
    if template:
        tok.chat_template = TEMPLATE
    width, vocab = (width, vocab) if table is None else (len(table), len(table))
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, attention_dropout=dropout,
        initializer_range=0.2, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=ends,
        pad_token_id=tok.pad_token_id)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = LlamaForCausalLM(config)
    if table is not None:
        rig(lm, table)
    if nasty:
        lm.generation_config.update(**NASTY)
    (lm.to(torch.bfloat16) if bf16 else lm).save_pretrained(path)
    tok.save_pretrained(path)
    return str(path)


@torch.no_grad()
def rig(lm: LlamaForCausalLM, table: torch.Tensor) -> None:
    V = len(table)
    lm.model.embed_tokens.weight.copy_(torch.eye(V))
    for layer in lm.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    lm.model.norm.weight.fill_((1 / V + lm.config.rms_norm_eps) ** 0.5)  # what RMSNorm divides a unit vector by
    lm.lm_head.weight.copy_(table.clamp(min=1e-30).log().T)


def chain(rows: dict[int, dict[int, float]], vocab: int = 18) -> torch.Tensor:
    """The table [V, V] of P(next | last). Tokens that are not listed are followed by the end token."""
    table = torch.zeros(vocab, vocab)
    table[:, END] = 1.0
    for last, following in rows.items():
        table[last] = 0.0
        for token, p in following.items():
            table[last, token] = p
    return table


def config(model: str, **settings) -> sppo.Config:
    """Settings for direct calls of the functions; the command line is not involved."""
    return sppo.Config(**{**dict(model=model, device="cpu", micro_batch_tokens=8192, instruction="", batch_size=8,
                                 mini_batch_size=8, max_response_tokens=16, max_grad_norm=1e9), **settings})


def problem(ids: list[int], gold: str = "7") -> sppo.Problem:
    return sppo.Problem("", torch.tensor(ids), torch.tensor(ids), gold)


def fixed_rollout(prompt_lengths, response_lengths, rewards, vocab: int = 18) -> sppo.Rollout:
    """Random prompts and responses of these lengths, with these rewards; nothing is sampled from a model."""
    draw = torch.Generator().manual_seed(1)
    tokens = lambda n: torch.randint(2, vocab, (n,), generator=draw)
    ro = sppo.Rollout([problem(tokens(n).tolist()) for n in prompt_lengths])
    ro.responses = [torch.cat([tokens(n - 1), torch.tensor([END])]) for n in response_lengths]
    ro.texts, ro.cut = [""] * len(ro.responses), [False] * len(ro.responses)
    ro.reward, ro.reasons = torch.tensor(rewards, dtype=torch.float), ["right" if R else "wrong" for R in rewards]
    return ro


def sgd(policy, critic=None, lr: float = 1.0) -> dict:
    """Plain gradient descent: a step IS the gradient, so scale errors show, which Adam would divide out."""
    models = {"policy": policy} | ({"critic": critic} if critic is not None else {})
    return {name: torch.optim.SGD(m.parameters(), lr=lr) for name, m in models.items()}


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def read_metrics(out: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    rows = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(("seconds", "tokens_per"))} for row in rows]
