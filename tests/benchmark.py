#!/usr/bin/env python3
"""Ratios that say what sppo.py costs against the least that it could: one table, on whatever device is here.

    python tests/benchmark.py [--quick] [--model DIR] [--only sample,update,toy,memory,drop,trl]

Times are medians of runs that alternate between the compared things, so that a busy machine slows both alike; with
OMP_NUM_THREADS=1 on a CPU they are processor time, which other programs hardly change (toy: wall time always). Peak
memory: on a GPU what the allocator reports, on a CPU the sum of the tensors that are alive (a profiler counts them).
"""

import argparse
import copy
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
import sppo
from value_head import Critic

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEVER = 10**9  # an end token that no vocabulary has


def report(name: str, ratio: float, goal: float | None = None, note: str = "", least: bool = False) -> None:
    met = "" if goal is None else "met" if (ratio >= goal if least else ratio <= goal) else "NOT MET"
    bound = "" if goal is None else f"{'>=' if least else '<='} {goal:.2f}"
    print(f"{name:66}{ratio:8.3f}  {bound:8} {met:8} {note}", flush=True)


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    alone = DEVICE == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if alone else time.perf_counter()


def seconds(work) -> float:
    begin = now()
    work()
    return now() - begin


def compare(times: int, *works) -> list[float]:
    """The median seconds of each, after one run for warming up; they take turns, the first to run changing."""
    for work in works:
        work()
    spent = [[] for _ in works]
    for turn in range(times):
        for k in range(len(works)):
            k = (k + turn) % len(works)
            spent[k].append(seconds(works[k]))
    return [statistics.median(s) for s in spent]


def peak_bytes(work) -> int:
    """The most that was allocated at any time during `work`, above what was there before."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    alive = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def qwen(vocabulary: int, layers: int = 4, width: int = 256):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        pad_token_id=None))


def model(args, vocabulary: int):
    if args.model:
        from transformers import AutoModelForCausalLM
        lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        lm.generation_config = type(lm.generation_config)()
    else:
        lm = qwen(vocabulary)
    return lm.to(DEVICE).eval()


def settings(**given) -> sppo.Config:
    return sppo.Config(**dict(device=DEVICE, micro_batch_tokens=8192, temperature=1.0) | given)


def stand_in(end: int = NEVER):
    """All that the sampler asks of a tokenizer."""
    return SimpleNamespace(end_ids={end}, pad_id=0, decode=lambda ids, **how: "")


def random_rollout(vocabulary: int, lengths: list[tuple[int, int]]) -> sppo.Rollout:
    """Responses already there: (prompt tokens, response tokens) of each row."""
    draw = lambda n: torch.randint(1, vocabulary, (n,))
    prompts = [draw(p) for p, _ in lengths]
    ro = sppo.Rollout([sppo.Problem("", ids, ids, "1") for ids in prompts], [draw(t) for _, t in lengths])
    ro.advantage = [torch.full((t,), random.choice((-0.5, 0.5))) for _, t in lengths]
    ro.critic_target, ro.old_log_probs = [torch.ones(1) for _ in lengths], [None] * len(lengths)
    return ro


# --------------------------------------------------------------------------------------------------- sampling


def benchmark_sampling(args) -> None:
    """sppo.sample against the model's own generate: the same rows, lengths and seed, no row ends early."""
    from transformers import GenerationConfig
    lm = model(args, 4096)
    rows, new = (16, 32) if args.quick else (32, 96)
    cfg, policy = settings(max_response_tokens=new), sppo.Policy(lm, 1.0)
    ro = random_rollout(lm.config.vocab_size, [(n, 1) for n in torch.randint(16, 48, (rows,)).tolist()])
    width = max(len(p.ids) for p in ro.problems)
    ids, mask = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.long)
    for row, p in enumerate(ro.problems):
        ids[row, width - len(p.ids):], mask[row, width - len(p.ids):] = p.ids, 1
    how = GenerationConfig(max_new_tokens=new, do_sample=True, top_k=0, temperature=1.0, pad_token_id=0,
                           eos_token_id=NEVER)
    found = {}

    def bare():
        torch.manual_seed(1)
        with sppo.autocast(DEVICE), torch.no_grad():
            found["bare"] = lm.generate(ids.to(DEVICE), attention_mask=mask.to(DEVICE), generation_config=how).cpu()

    def ours():
        torch.manual_seed(1)
        sppo.sample(ro, policy, stand_in(), cfg)
    ours_s, bare_s = compare(3 if args.quick else 5, ours, bare)
    same = torch.equal(found["bare"][:, width:], torch.stack(ro.responses))
    report("sampling / bare generate", ours_s / bare_s, 1.03,
           f"{rows} rows x {new} tokens, {ours_s:.2f} s, {'the same' if same else 'OTHER'} tokens")


# --------------------------------------------------------------------------------------------------- update


def benchmark_update(args) -> None:
    """One policy update, against one forward and one backward pass over the same tokens and none of the padding.

    The floor reads each row alone where it is unlike the others: rows of one length go through together.
    """
    lm = model(args, 4096)
    policy, vocabulary = sppo.Policy(lm, 1.0), lm.config.vocab_size
    rows = 16 if args.quick else 32
    lengths = [(random.randint(20, 60), random.randint(30, 120)) for _ in range(rows)]
    ro = random_rollout(vocabulary, lengths)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, fused=True)
    tokens = sum(p + t for p, t in lengths)
    packed = torch.randint(1, vocabulary, (-(-tokens // 100), 100), device=DEVICE)
    share = sum(t for _, t in lengths) / tokens

    def floor(steps: int):
        """As many tokens as there are, in rows of one length; logits only for as many as the responses have."""
        for part in packed.chunk(steps):
            for ids in part.split(10):
                with sppo.autocast(DEVICE):
                    hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
                    hidden = hidden[: int(len(hidden) * share)]
                    target = ids.flatten()[: len(hidden)]
                    loss = torch.nn.functional.cross_entropy(lm.get_output_embeddings()(hidden).float(), target)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    for minis, goal, note in ((1, 1.05, "no old log-probs needed"), (2, 1.25, "old log-probs of the second half, 1/6 "
                                                                     "of the work, in a pass of their own")):
        cfg = settings(batch_size=rows, mini_batch_size=rows // minis, micro_batch_tokens=1024, algorithm="reinforce")
        floor_s, ours_s = compare(3 if args.quick else 7, lambda: floor(minis), lambda: sppo.update(
            policy, None, {"policy": optimizer}, ro, cfg, 1))
        report(f"update, {minis} mini-batch{'es' * (minis > 1)} / forward + backward", ours_s / floor_s, goal,
               f"{tokens} tokens, floor {floor_s:.2f} s; {note}")


# --------------------------------------------------------------------------------------------------- a toy run


def benchmark_toy(args) -> None:
    """Where the time of a real toy run goes."""
    steps = 4 if args.quick else 12
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(HERE / "sppo.py"), "--steps", str(steps), "--out", f"{folder}/run",
                        "--eval-size", "16", "--critic-warmup", "0", "--device", DEVICE], check=True, capture_output=True)
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
        batch = json.load(open(f"{folder}/run/config.json"))["batch_size"]
    rows = [r for r in rows if r["step"] > 1]
    spent = {phase: sum(r[f"seconds/{phase}"] for r in rows) for phase in ("sample", "verify", "value", "update")}
    tokens = rows[-1]["response_tokens"]
    whole = sum(batch * r["response_tokens"] / r["tokens_per_second"] for r in rows)  # the step, all but eval and saving
    report("toy: sampling + update, share of a step", (spent["sample"] + spent["update"]) / whole, 0.85,
           f"{whole / len(rows):.2f} s a step, {tokens:.0f} tokens a response", least=True)
    report("toy: values, share of a step", spent["value"] / whole)
    report("toy: verifying and all else, share of a step",
           1 - (spent["sample"] + spent["update"] + spent["value"]) / whole, 0.05,
           f"verify alone {spent['verify'] / whole:.3f}")


# --------------------------------------------------------------------------------------------------- memory


def benchmark_memory(args) -> None:
    """Forward and backward pass of the log-probs, at a vocabulary of 151,936, against a whole table of logits."""
    policy = sppo.Policy(qwen(151_936, layers=2, width=64).to(DEVICE), 1.0)
    cfg = settings(micro_batch_tokens=1024)
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)

    def ours(ro):
        for group in sppo.micro_batches([len(p.ids) + len(a) for p, a in zip(ro.problems, ro.responses)],
                                        cfg.micro_batch_tokens):
            sppo.policy_forward(policy, ro, group)[0].sum().backward()

    def naive(ro):
        ids, (rows, columns) = sppo.lay_out([torch.cat([p.ids, a]) for p, a in zip(ro.problems, ro.responses)],
                                            [len(a) for a in ro.responses], DEVICE)
        with sppo.autocast(DEVICE):
            log_pi = policy.lm(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)  # [B, S, V]
        log_pi[rows, columns - 1, ids[rows, columns]].sum().backward()
    few, many = (random_rollout(151_936, [(64, 192)] * n) for n in (4, 16))
    ours(few)
    ours_few, naive_few, ours_many = peak_bytes(lambda: ours(few)), peak_bytes(lambda: naive(few)), peak_bytes(
        lambda: ours(many))
    report("peak memory, log-probs / whole table of logits", ours_few / naive_few, 0.25,
           f"{ours_few / 2**20:.0f} of {naive_few / 2**20:.0f} MB, 4 rows of 256 tokens")
    report("peak memory, 16 rows / 4 rows, same --micro-batch-tokens", ours_many / ours_few, 1.10)


# --------------------------------------------------------------------------------------------------- dropping


class EndAt:
    """Logits processor: row i of the batch ends after lengths[i] tokens. Restarted rows are told by their prompts."""

    def __init__(self, lengths: dict[int, int], prompt: int):
        self.lengths, self.prompt = lengths, prompt

    def __call__(self, ids, scores):  # the first token of each prompt is the row's number
        ends = torch.tensor([ids.shape[1] - self.prompt + 1 >= self.lengths[i] for i in ids[:, 0].tolist()])
        scores[:, 1] = torch.where(ends.to(scores.device), 1e9, -1e9)
        return scores


def benchmark_dropping(args) -> None:
    """What gathering the unfinished rows buys, with the lengths of real answers and with a few very long ones."""
    from transformers import LogitsProcessorList
    toy = sppo.parse(["--device", DEVICE, "--model", str(HERE / "toy/model")])
    policy, _, tok, critic_tok = sppo.build(toy)
    problems = sppo.load_problems(toy.dataset, "train", toy, tok, critic_tok)
    real = sppo.Rollout(problems[:128])
    sppo.sample(real, policy, tok, toy)
    real_lengths = [len(a) for a in real.responses]
    longest = 128 if args.quick else 384
    tailed = [min(longest, int(12 / (1 - random.random()) ** 1.1)) for _ in range(128)]
    tailed[0] = longest
    lm = model(args, 4096)
    for name, lengths in (("toy", real_lengths), ("long-tailed", tailed)):
        ids = torch.randint(200, lm.config.vocab_size, (len(lengths), 32))
        ids[:, 0] = torch.arange(len(lengths)) + 2
        ro = sppo.Rollout([sppo.Problem("", row, row, "1") for row in ids])
        cfg, policy = settings(max_response_tokens=max(lengths)), sppo.Policy(lm, 1.0)
        at = EndAt({i + 2: n for i, n in enumerate(lengths)}, 32)
        generate, half_done = lm.generate, sppo.HalfDone.__call__
        lm.generate = lambda *a, **k: generate(*a, logits_processor=LogitsProcessorList([at]), **k)

        def dropping():
            sppo.sample(ro, policy, stand_in(1), cfg)

        def whole():
            sppo.HalfDone.__call__ = lambda self, i, s, **k: torch.zeros(len(i), dtype=torch.bool, device=i.device)
            sppo.sample(ro, policy, stand_in(1), cfg)
            sppo.HalfDone.__call__ = half_done
        ours_s, whole_s = compare(1 if args.quick else 3, dropping, whole)
        lm.generate = generate
        assert [len(a) for a in ro.responses] == lengths
        report(f"dropping finished rows / whole batch, {name} lengths", ours_s / whole_s, None,
               f"{len(lengths)} rows, median {statistics.median(lengths):.0f}, longest {max(lengths)} tokens")


# --------------------------------------------------------------------------------------------------- TRL


def benchmark_trl(args) -> None:
    """Step time and peak memory against GRPOTrainer: as many responses of the same length, from the same model."""
    try:
        from datasets import Dataset
        from transformers import PreTrainedTokenizerFast, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except Exception as error:
        return print(f"TRL is not installed ({sppo.first_line(error)}): not compared")
    from tokenizers import Tokenizer, models, pre_tokenizers
    vocabulary, rows, new, steps = 32_000, 32, 32 if args.quick else 64, 2 if args.quick else 4
    words = {f"w{i}": i for i in range(vocabulary)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tok = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", eos_token="w1", unk_token="w0")
    texts = [" ".join(f"w{random.randrange(2, vocabulary)}" for _ in range(40)) for _ in range(rows)]
    base = qwen(vocabulary).to(DEVICE)
    base.generation_config.eos_token_id = base.config.eos_token_id = NEVER  # every row runs to its full length
    stamps = []

    class Stamp(TrainerCallback):
        def on_step_end(self, *given, **named):
            stamps.append(now())

    def reward(completions, **named):
        return [float(i % 2) for i in range(len(completions))]

    def trl():
        del stamps[:]
        with tempfile.TemporaryDirectory() as folder:
            GRPOTrainer(copy.deepcopy(base), reward, GRPOConfig(
                output_dir=folder, per_device_train_batch_size=rows, num_generations=8, max_steps=steps, beta=0.0,
                max_completion_length=new, temperature=1.0, learning_rate=1e-6, use_cpu=DEVICE == "cpu", bf16=False,
                gradient_checkpointing=False, save_strategy="no", report_to="none", disable_tqdm=True,
                logging_strategy="no"), train_dataset=Dataset.from_dict({"prompt": texts}), processing_class=tok,
                callbacks=[Stamp()]).train()

    lm = copy.deepcopy(base).eval()
    policy, critic = sppo.Policy(lm, 1.0), Critic(copy.deepcopy(base.base_model)).eval()
    cfg = settings(batch_size=rows, mini_batch_size=rows, max_response_tokens=new, lr=1e-6, micro_batch_tokens=1024)
    end = SimpleNamespace(end_ids={NEVER}, pad_id=0, decode=lambda ids, **how: "")

    def ours():
        optimizers = sppo.make_optimizers(cfg, policy, critic)
        ids = [torch.tensor(tok(text).input_ids) for text in texts]
        for step in range(1, steps + 1):
            ro = sppo.Rollout([sppo.Problem("", row, row, "1") for row in ids])
            sppo.sample(ro, policy, end, cfg)
            ro.reward = torch.tensor([float(i % 2) for i in range(rows)])
            sppo.value(ro, critic, cfg)
            sppo.advantage(ro, cfg)
            sppo.update(policy, critic, optimizers, ro, cfg, step)
            stamps_ours.append(now())
    stamps_ours, per_step = [], lambda t: statistics.median(b - a for a, b in zip(t, t[1:]))
    ours_s, trl_s = [], []
    for _ in range(1 if args.quick else 3):
        del stamps_ours[:]
        ours()
        trl()
        ours_s.append(per_step(stamps_ours))
        trl_s.append(per_step(stamps))
    ours_s, trl_s = statistics.median(ours_s), statistics.median(trl_s)
    report("step time / TRL's GRPOTrainer", ours_s / trl_s, 0.80,
           f"{rows} responses of {new} tokens, critic included; {ours_s:.2f} and {trl_s:.2f} s a step")
    static = sum(p.numel() for p in critic.parameters()) * 4 + sum(p.numel() for p in lm.parameters()) * 4
    ours_b, trl_b = peak_bytes(ours) + static, peak_bytes(trl)  # TRL's run copies the policy itself
    report("peak memory / TRL's GRPOTrainer", ours_b / trl_b, 0.50,
           f"policy, critic and optimizers counted; {ours_b / 2**20:.0f} and {trl_b / 2**20:.0f} MB")


PARTS = dict(sample=benchmark_sampling, update=benchmark_update, toy=benchmark_toy, memory=benchmark_memory,
             drop=benchmark_dropping, trl=benchmark_trl)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="about a minute: smaller, fewer repetitions")
    parser.add_argument("--model", default="", help="model folder for sampling, updates (default: small, random)")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, with commas between them: {', '.join(PARTS)}")
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(PARTS):
        parser.error(f"--only {', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    print(f"{DEVICE}, {torch.get_num_threads()} thread(s), torch {torch.__version__}\n{'':66}{'ratio':>8}  goal")
    for part in args.only.split(","):
        random.seed(0)
        torch.manual_seed(0)
        PARTS[part](args)


if __name__ == "__main__":
    main()
