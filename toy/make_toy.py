"""Make the embedded toy: a tiny language model that almost knows arithmetic, and the problems to train and test it on.

    python toy/make_toy.py                         # rebuild toy/ (about 100 seconds on one core)
    python toy/make_toy.py --out /tmp/long --min-steps 8 --max-steps 8 --wrong-rate 0.05    # a variant: longer chains

A problem is a chain of additions and subtractions. The response works it out, one step a line, and boxes the result,
the way a reasoning model works out a mathematics problem:

    prompt      38+17-19=
    response    38+17=55
                55-19=36
                \\boxed{36}<end>

Reinforcement learning needs a model that is right sometimes: never right gives nothing to reinforce, always right
leaves nothing to learn. Two choices in this file make such a model, and both are on purpose.

1. The teacher is noisy. At a carry it often forgets the carry (38+17=45), at a borrow it often takes the smaller
   digit from the larger (52-19=47), elsewhere it slips by one now and then; and it goes on from the wrong number. A
   model that imitates it knows how to be right *and* how to be wrong, and the choice is left to the reward. The teacher
   forgets a little more often than not, so the model's most likely answer is no better than its samples: sampling less
   randomly does not solve the toy. The model has to learn something, not just to sharpen what it does.
2. Imitation stops early, while the model is still unsure of some sums and of where in the prompt to look.

Every step can fail, so a longer chain is solved less often. That much the critic V(s_p) can see in the prompt alone.
"""
import argparse
import json
import random
import sys
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, END = "<pad>", "<end>"
VOCABULARY = [PAD, END, *"0123456789", "+", "-", "=", "\n", "\\boxed{", "}"]
LEAST, MOST = 10, 59  # range of every term and running total: two digits each, so the text is short and quick to learn


# ---------------------------------------------------------------------------------------------------------- problems
def make_problem(rng: random.Random, steps: int) -> tuple[int, list[int]]:
    """Draw the running totals first; the terms between them follow. Returns (first number, signed terms)."""
    totals = [rng.randint(LEAST, MOST)]
    while len(totals) <= steps:
        total = rng.randint(LEAST, MOST)
        if abs(total - totals[-1]) >= LEAST:
            totals.append(total)
    return totals[0], [after - before for before, after in zip(totals, totals[1:])]


def expression(first: int, terms: list[int]) -> str:
    return str(first) + "".join(f"{term:+d}" for term in terms) + "="


def make_split(rng: random.Random, count: int, step_range: range, taken: set[str]) -> list[dict]:
    """`count` different problems, the chain lengths in equal shares, none of them in `taken` (which grows)."""
    rows, tries = [], 0
    while len(rows) < count:
        first, terms = make_problem(rng, step_range[len(rows) % len(step_range)])
        prompt = expression(first, terms)
        tries += 1
        if tries > 100 * count:
            sys.exit(f"make_toy: too few different {step_range[0]}-step problems to draw {count}; ask for fewer")
        if prompt not in taken:
            taken.add(prompt)
            rows.append({"prompt": prompt, "answer": str(first + sum(terms))})
    rng.shuffle(rows)
    return rows


# ----------------------------------------------------------------------------------------------------- noisy teacher
def noisy_result(rng: random.Random, total: int, term: int, wrong_rate: float) -> int:
    """One step of the teacher: total + term, or a mistake that people make. Mistakes gather at carries and borrows."""
    units = total % 10 + (term % 10 if term > 0 else -(-term % 10))
    if 0 <= units <= 9:  # an easy step: now and then it slips by one
        return total + term + (rng.choice((-1, 1)) if rng.random() < wrong_rate / 10 else 0)
    if rng.random() >= 2.5 * wrong_rate:
        return total + term
    if term > 0:  # 38+47=75: the carry is forgotten
        return total + term - 10
    return 10 * (total // 10 - -term // 10) - units  # 52-19=47: the smaller digit is taken from the larger


def worked_chain(rng: random.Random, first: int, terms: list[int], wrong_rate: float) -> str:
    """The teacher's response; after a mistake it goes on from the wrong number, as a person would."""
    lines, total = [], first
    for term in terms:
        result = noisy_result(rng, total, term, wrong_rate)
        lines.append(f"{total}{term:+d}={result}")
        total = result
    return "\n".join([*lines, f"\\boxed{{{total}}}"])


# ------------------------------------------------------------------------------------------------ tokenizer and model
def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, except that `\\boxed{` is one token. Decoding joins the tokens with nothing between."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=END, padding_side="left",
                                   model_max_length=512, clean_up_tokenization_spaces=False)


def make_model(width: int, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.1,  # the usual 0.02 suits wide models; a narrow one learns sooner from larger weights
        pad_token_id=VOCABULARY.index(PAD), eos_token_id=VOCABULARY.index(END), bos_token_id=None,
    )
    return LlamaForCausalLM(config)


# -------------------------------------------------------------------------------------------------------- imitation
def teacher_batch(rng: random.Random, tokenizer, step_range: range, held_out: set[str], size: int, wrong_rate: float):
    """`size` prompts and the teacher's responses -> ids, labels, both [size, longest]; label -100 is not learned."""
    ids, labels = [], []
    while len(ids) < size:
        first, terms = make_problem(rng, rng.choice(step_range))
        if expression(first, terms) in held_out:
            continue
        prompt = tokenizer(expression(first, terms) + "\n").input_ids
        response = tokenizer(worked_chain(rng, first, terms, wrong_rate) + END).input_ids
        ids.append(torch.tensor(prompt + response))
        labels.append(torch.tensor([-100] * len(prompt) + response))
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return pad(ids, padding_value=tokenizer.pad_token_id), pad(labels, padding_value=-100)


def imitate(model, tokenizer, args, held_out: set[str]) -> None:
    """Fine-tune on fresh teacher chains: a short warm-up, a constant rate, then a linear decay; --sft-steps updates."""
    rng = random.Random(args.seed + 1)
    step_range = range(args.min_steps, args.max_steps + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.sft_lr, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step in range(1, args.sft_steps + 1):
        done = step / (args.sft_steps + 1)
        optimizer.param_groups[0]["lr"] = args.sft_lr * min(1.0, 20 * done, 2 * (1 - done))
        ids, labels = teacher_batch(rng, tokenizer, step_range, held_out, args.sft_batch, args.wrong_rate)
        loss = model(input_ids=ids, labels=labels).loss  # padding is on the right here, so causality hides it
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"imitation step {step:5d}  loss {loss.item():.3f}", flush=True)


# ------------------------------------------------------------------------------------------------------------ check
@torch.no_grad()
def solved(model, tokenizer, rows: list[dict], sample: bool) -> list[bool]:
    model.eval()
    batch = tokenizer([row["prompt"] + "\n" for row in rows], return_tensors="pt", padding=True)
    longest = 12 * max(steps_of(row) for row in rows) + 12
    how = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0) if sample else dict(do_sample=False)
    output = model.generate(**batch, max_new_tokens=longest, **how)
    texts = tokenizer.batch_decode(output[:, batch.input_ids.shape[1]:], skip_special_tokens=True)
    return [text.endswith(f"\n\\boxed{{{row['answer']}}}") for text, row in zip(texts, rows)]


def steps_of(row: dict) -> int:
    return sum(row["prompt"].count(sign) for sign in "+-")


def report(model, tokenizer, rows: list[dict], repeats: int = 8) -> None:
    """Print how many test problems the model solves before it has seen a reward, over all and by chain length."""
    greedy = solved(model, tokenizer, rows, sample=False)
    sampled = solved(model, tokenizer, rows * repeats, sample=True)
    print(f"test problems solved: greedy {fmean(greedy):.3f}, sampled at temperature 1 {fmean(sampled):.3f}")
    for steps in sorted({steps_of(row) for row in rows}):
        share = fmean([ok for ok, row in zip(sampled, rows * repeats) if steps_of(row) == steps])
        share_greedy = fmean([ok for ok, row in zip(greedy, rows) if steps_of(row) == steps])
        print(f"  {steps:2d} steps: sampled {share:.3f}, greedy {share_greedy:.3f}")


# ------------------------------------------------------------------------------------------------------------- main
def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save(model, tokenizer, folder: Path) -> None:
    """An ordinary Hugging Face folder; the tokenizer's class gets the name that transformers 4 and 5 both know."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rebuild the toy model and its problems from a seed.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path(__file__).parent, help="folder for model/, train.jsonl, test.jsonl")
    add("--seed", type=int, default=0, help="fixes the problems, the teacher's mistakes and the first weights")
    add("--min-steps", type=int, default=1, help="shortest chain")
    add("--max-steps", type=int, default=4, help="longest chain")
    add("--train", type=int, default=3000, help="training problems")
    add("--test", type=int, default=200, help="test problems; none of them is ever shown in training")
    add("--wrong-rate", type=float, default=0.24, help="about how many steps the teacher gets wrong")
    add("--sft-steps", type=int, default=2000, help="updates of imitation; fewer leave a worse model")
    add("--sft-batch", type=int, default=32, help="chains an update")
    add("--sft-lr", type=float, default=5e-3, help="learning rate of imitation")
    add("--width", type=int, default=64, help="hidden size of the model")
    add("--layers", type=int, default=3, help="layers of the model")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # fixed: the last bits of a sum depend on it, and so small a model hardly gains from more
    rng, taken = random.Random(args.seed), set()
    step_range = range(args.min_steps, args.max_steps + 1)
    test = make_split(rng, args.test, step_range, taken)
    held_out = set(taken)
    train = make_split(rng, args.train, step_range, taken)
    tokenizer, model = make_tokenizer(), make_model(args.width, args.layers)
    imitate(model, tokenizer, args, held_out)
    report(model, tokenizer, test)
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "test.jsonl", test)
    save(model, tokenizer, args.out / "model")
    print(f"wrote {len(train)} + {len(test)} problems, a model of {model.num_parameters():,} parameters to {args.out}")


if __name__ == "__main__":
    main()
