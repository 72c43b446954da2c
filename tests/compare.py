#!/usr/bin/env python3
"""The paper's comparison on the toy: every --algorithm, and what each one's advantage knows.

    python tests/compare.py             # all of it, finished runs are kept; about an hour on 2 cores
    python tests/compare.py --quick     # 2 seeds of the first picture at the rates below; under 10 minutes

Training runs (equal numbers of sampled responses; a small grid of learning rates, the same for all; 5 seeds), then
measurements at equal policy: critics trained beside a policy that stands still (--lr 0), on chains of several lengths.
Runs go to runs/compare, one thread each, two at a time. Writes assets/compare.csv and four pictures beside it.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import sppo
from value_check import correlation, load_run, ranks, value_and_solve_rate

sppo.say = lambda *words: None  # the tables below are the output
RESPONSES, STEPS = 128, 60  # responses a step (ReMax's greedy ones counted), in four mini-batches
GRID = ("1.5e-4", "3e-4", "6e-4")  # policy learning rates; seed 100 decides, by the mean accuracy over its run
ALGORITHMS = {  # name: flags, responses a prompt, and the rate that the grid chose when the README's table was made
    "SPPO": ([], 1, "6e-4"),
    "SPPO, 1-layer critic": (["--critic-layers", "1"], 1, "6e-4"),
    "PPO, lambda 1": (["--algorithm", "ppo"], 1, "6e-4"),
    "PPO, lambda 0.95": (["--algorithm", "ppo", "--lam", "0.95"], 1, "3e-4"),
    "GRPO, N = 8": (["--algorithm", "grpo"], 8, "6e-4"),
    "RLOO, N = 8": (["--algorithm", "rloo"], 8, "6e-4"),
    "ReMax": (["--algorithm", "remax"], 2, "3e-4"),
    "REINFORCE, b = 0.5": (["--algorithm", "reinforce"], 1, "6e-4"),
}
CHAINS = {2: 0.24, 4: 0.12, 8: 0.06, 16: 0.03}  # steps a problem: the teacher's wrong rate, so that about half are solved


# ------------------------------------------------------------------------------------------------------------- runs


def train(folder: Path, name: str, *flags: str) -> Path:
    """The run folder/name, trained unless it has finished before."""
    out, unfinished = folder / name, folder / f"{name}.unfinished"
    if not out.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [sys.executable, str(ROOT / "sppo.py"), "--device", "cpu", "--show-every", "1000",
                   "--out", str(unfinished), *flags]
        print(f"running {name}", flush=True)
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
        unfinished.rename(out)
    return out


def race(folder: Path, name: str, lr: str, seed: int) -> Path:
    flags, copies, _ = ALGORITHMS[name]
    short = name.replace(", ", "-").replace(" ", "").replace("=", "")
    return train(folder, f"{short}-{lr}-seed{seed}", "--steps", str(STEPS), "--seed", str(seed), "--lr", lr,
                 "--critic-warmup", "0", "--batch-size", str(RESPONSES // copies), "--mini-batch-size",
                 str(RESPONSES // 4 // copies), "--eval-every", "5", "--eval-samples", "2", "--no-eval-greedy",
                 "--save-every", "15", *flags)


def make_chain(folder: Path, steps: int) -> Path:
    """A toy whose problems all have so many steps."""
    toy = folder / f"chain-{steps}"
    if not (toy / "model").exists():
        print(f"making {toy.name}", flush=True)
        subprocess.run([sys.executable, str(ROOT / "toy/make_toy.py"), "--out", str(toy), "--min-steps", str(steps),
                        "--max-steps", str(steps), "--wrong-rate", str(CHAINS[steps]), "--train", "1000",
                        "--test", "100"], check=True, capture_output=True)
    return toy


def still(folder: Path, steps: int, algorithm: str, toy=None) -> Path:
    """A critic trained for 60 steps of 256 responses beside a policy that does not move; steps 0: the toy itself."""
    flags = ["--algorithm", algorithm, "--lr", "0", "--steps", "60", "--batch-size", "256", "--mini-batch-size", "64",
             "--eval-every", "60", "--save-every", "60", "--critic-lr", "1e-3", "--critic-warmup", "60"]
    if steps:
        toy = toy.result()
        flags += ["--model", str(toy / "model"), "--dataset", str(toy / "train.jsonl"), "--eval-dataset",
                  str(toy / "test.jsonl"), "--instruction", "", "--max-response-tokens", str(12 * steps + 12)]
    return train(folder, f"still-{steps}-{algorithm}", *flags)


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# ----------------------------------------------------------------------------------------------------- learning curves


def curve(out: Path) -> list[tuple[int, float, float]]:
    """(responses sampled, seconds of training, accuracy) at each evaluation; evaluating itself is not counted."""
    points, seconds = [], 0.0
    for row in rows_of(out):
        seconds += sum(v for k, v in row.items() if k.startswith("seconds/") and k != "seconds/evaluate")
        if "eval/accuracy" in row:
            points.append((row["step"] * RESPONSES, seconds, row["eval/accuracy"]))
    return points


def area(points: list[tuple]) -> float:
    """Mean accuracy over the run's evaluations: how fast and how far it learned, in one number."""
    return statistics.mean(p[2] for p in points)


def reaches(points: list[tuple], goal: float, axis: int) -> float:
    """Where on the axis (0 responses, 1 seconds) the accuracy first reaches the goal; infinite if never."""
    return next((p[axis] for p in points if p[2] >= goal), float("inf"))


def at_second(points: list[tuple], second: float) -> float:
    """Accuracy after so many seconds, on the straight line between the evaluations around it."""
    for (_, s0, a0), (_, s1, a1) in zip(points, points[1:]):
        if s0 <= second <= s1:
            return a0 + (a1 - a0) * (second - s0) / (s1 - s0)
    return points[-1][2]


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def curves_table(curves: dict) -> None:
    equal = min(points[-1][1] for runs in curves.values() for points in runs)
    print(f"\n± one standard deviation over the seeds; equal wall-clock is {equal:.0f} s of training on one core\n\n"
          "| algorithm | lr | accuracy at the end | mean over the run | at equal wall-clock | responses to 0.9 | "
          "seconds to 0.9 |\n|---|---|---|---|---|---|---|")
    for (name, lr), runs in curves.items():
        middle = lambda axis: statistics.median(reaches(points, 0.9, axis) for points in runs)
        words = lambda x: f"{x:.0f}" if x < float("inf") else "not reached"
        print(f"| {name} | {lr} | {spread([r[-1][2] for r in runs])} | {spread([area(r) for r in runs])} | "
              f"{spread([at_second(r, equal) for r in runs])} | {words(middle(0))} | {words(middle(1))} |")
    best = sorted(curves, key=lambda key: -statistics.mean(map(area, curves[key])))
    print("\nin order of the mean over the run: " + " > ".join(name for name, _ in best))


# ------------------------------------------------------------------------------------------------- at equal policy


@torch.no_grad()
def measure(sppo_run: Path, ppo_run: Path, samples: int = 64) -> dict:
    """What each method's advantage knows, over the same responses of the same policy.

    The yardstick is R - p with p the solve rate of the prompt over `samples` responses. For each method: the standard
    deviation of A, its correlation with R - p (token by token; "early": over the first quarter of each response), and
    the share of responses with A = 0. For the token-level critic: how well V_t tells responses that will be right
    from others, by position, beside an oracle that knows whether a mistake has been written yet (0.5: not at all).
    """
    name = sppo.newest_checkpoint(sppo_run).name
    cfg, policy, critic, tok, problems = load_run(sppo_run, name)
    problems = problems[:100]
    V, rate = value_and_solve_rate(cfg, policy, critic, tok, problems, samples)
    sppo.seed_everything(cfg.seed, -2)  # the same responses once more, now kept
    ro = sppo.Rollout([p for p in problems for _ in range(samples)])
    sppo.sample(ro, policy, tok, cfg)
    sppo.verify(ro)
    R, p = ro.reward, rate.repeat_interleave(samples)  # [100 * samples]
    exact = R - p
    found = {"solve rate": R.mean().item(), "tokens": statistics.mean(map(len, ro.responses)),
             "pearson": correlation(V, rate), "spearman": correlation(ranks(V), ranks(rate)),
             "V": V.tolist(), "rate": rate.tolist(), "methods": {}}
    broadcast = {"SPPO": sppo.sppo_advantage(R, V.repeat_interleave(samples)), "REINFORCE": R - 0.5, "exact": exact}
    for N in (2, 4, 8, 16):
        broadcast |= {f"GRPO {N}": sppo.grpo_advantage(R, N), f"RLOO {N}": sppo.rloo_advantage(R, N)}
    for name, A in broadcast.items():
        r = correlation(A, exact)
        found["methods"][name] = dict(std=A.std().item(), knows=r, early=r, dead=(A == 0).float().mean().item())

    cfg, policy, critic, tok, _ = load_run(ppo_run, sppo.newest_checkpoint(ppo_run).name)
    few = [i for i in range(len(R)) if i % samples < 16]  # a token critic reads whole responses: 16 a prompt will do
    part = sppo.Rollout([ro.problems[i] for i in few], responses=[ro.responses[i] for i in few])
    sppo.value(part, critic, cfg)
    values = [v for v in part.value]  # V_t, B x [T_i]
    for lam in (0.9, 0.95, 0.99, 1.0):
        A = [sppo.gae_advantage(R[i].item(), v, 1.0, lam) for i, v in zip(few, values)]
        same = torch.cat([exact[i].expand(len(v)) for i, v in zip(few, values)])
        early = [a[: max(1, len(a) // 4)] for a in A]
        same_early = torch.cat([exact[i].expand(len(a)) for i, a in zip(few, early)])
        flat = torch.cat(A)
        found["methods"][f"GAE {lam}"] = dict(std=flat.std().item(), knows=correlation(flat, same), dead=0.0,
                                              early=correlation(torch.cat(early), same_early))
    right, good = R[few].bool(), [unspoilt(part.problems[k].text, ro.texts[i], tok) for k, i in enumerate(few)]
    found["tail"] = []
    for tenth in range(11):
        at = [min(len(v) - 1, round(tenth / 10 * (len(v) - 1))) for v in values]
        V_t = torch.tensor([v[t].item() for v, t in zip(values, at)])
        oracle = torch.tensor([float(t <= n) for n, t in zip(good, at)])
        found["tail"].append((tenth / 10, separates(V_t, right), separates(oracle, right)))
    return found


def unspoilt(prompt: str, text: str, tok) -> int:
    """How many tokens of the response stand before its first mistake: as far as it agrees with the right chain."""
    total, lines = 0, []
    for k, term in enumerate(prompt.strip().rstrip("=").replace("-", "+-").split("+")):
        if k:
            lines.append(f"{total}{int(term):+d}={total + int(term)}")
        total += int(term)
    agreed = os.path.commonprefix(["\n".join([*lines, f"\\boxed{{{total}}}"]), text])
    return len(sppo.plain_ids(tok, agreed))


def separates(score: torch.Tensor, right: torch.Tensor) -> float:
    """P(score of a right response > score of a wrong one), ties counted half: the area under the ROC curve."""
    place = ranks(score)[right]
    n, m = len(place), len(right) - len(place)
    return ((place.sum() - n * (n + 1) / 2) / (n * m)).item()


def measured_tables(found: dict) -> None:
    print("\nat equal policy: standard deviation of A / correlation with R - p / the same over the first quarter of a "
          "response / share with A = 0\n\n| method | " + " | ".join(
              f"{n} steps" if n else "the toy" for n in found) + " |\n|---" + "|---" * len(found) + "|")
    for name in found[0]["methods"]:
        cells = [f["methods"][name] for f in found.values()]
        print(f"| {name} | " + " | ".join(f"{c['std']:.2f} / {c['knows']:.2f} / {c['early']:.2f} / {c['dead']:.2f}"
                                          for c in cells) + " |")
    for n, f in found.items():
        print(f"{n or 'the toy'}: solve rate {f['solve rate']:.2f}, {f['tokens']:.0f} tokens a response, V against "
              f"solve rate: Pearson {f['pearson']:.3f}, Spearman {f['spearman']:.3f}")
        print("   separation by position, V_t (oracle): "
              + " ".join(f"{100 * x:.0f}% {v:.2f} ({o:.2f})" for x, v, o in f["tail"][::2]))


# --------------------------------------------------------------------------------------------------------- pictures


def draw(curves: dict, values: dict, found: dict, folder: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        return print("matplotlib is not installed: no pictures")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    colors = dict(zip(ALGORITHMS, plt.cm.tab10.colors))

    @contextmanager
    def picture(name: str, panels: int, **how):
        fig, axes = plt.subplots(1, panels, figsize=(4.6 * panels, 3.6), layout="constrained", **how)
        for ax in axes:
            ax.grid(alpha=0.3)
        yield axes
        fig.savefig(folder / f"{name}.png", dpi=100, facecolor="white")
        plt.close(fig)

    with picture("compare", 3) as axes:
        for place, ((name, lr), runs) in enumerate(curves.items()):
            for axis in (0, 1):
                columns = list(zip(*runs))  # one entry an evaluation: the same point of each seed
                x = [statistics.mean(p[axis] for p in c) for c in columns]
                y = [statistics.mean(p[2] for p in c) for c in columns]
                sd = [statistics.stdev(p[2] for p in c) for c in columns]
                axes[axis].plot(x, y, color=colors[name], label=name, lw=2.4 if name == "SPPO" else 1.2)
                axes[axis].fill_between(x, [a - s for a, s in zip(y, sd)], [a + s for a, s in zip(y, sd)],
                                        color=colors[name], alpha=0.1, lw=0)
            times = [t for t in (reaches(points, 0.9, 1) for points in runs) if t < float("inf")]
            axes[2].plot(times, [place] * len(times), "o", color=colors[name], alpha=0.6)
            axes[2].text(1.02, place, f"{len(times)}/{len(runs)}", transform=axes[2].get_yaxis_transform(), va="center")
        axes[0].set(xlabel="responses sampled", ylabel="sampled accuracy, held-out problems")
        axes[1].set(xlabel="seconds of training, one CPU core", ylabel="sampled accuracy, held-out problems")
        axes[2].set(xlabel="seconds to accuracy 0.9 (right: runs that got there)", yticks=range(len(curves)),
                    yticklabels=[name for name, _ in curves], ylim=(len(curves) - 0.5, -0.5))
        axes[0].legend(fontsize=7)
    if not found:
        return
    with picture("value", len(values), sharex=True, sharey=True) as axes:
        for ax, (name, (V, rate)) in zip(axes, values.items()):
            ax.plot([0, 1], [0, 1], color="gray", lw=1)
            ax.plot(V, rate, "o", ms=3, alpha=0.5)
            ax.set(title=f"{name}: Pearson {correlation(V, rate):.2f}, Spearman {correlation(ranks(V), ranks(rate)):.2f}",
                   xlabel="V(s_p)", ylabel="measured solve rate")
            ax.title.set_fontsize(9)
    lengths = [n for n in found if n]
    with picture("advantage", 2) as axes:
        shown = [m for m in found[0]["methods"]]
        axes[0].barh(shown, [found[0]["methods"][m]["std"] for m in shown], color="tab:blue")
        axes[0].set(xlabel="standard deviation of A at equal policy (the toy)")
        axes[0].invert_yaxis()
        for m in ("SPPO", "GRPO 8", "GRPO 2", "GAE 1.0", "GAE 0.95", "GAE 0.9"):
            axes[1].plot(lengths, [found[n]["methods"][m]["early"] for n in lengths], marker="o", label=m)
        axes[1].set(xscale="log", xticks=lengths, xticklabels=lengths, ylim=(0, 1.02), xlabel="steps of the chain",
                    ylabel="correlation of A with R - p,\nfirst quarter of the response")
        axes[1].minorticks_off()
        axes[1].legend(fontsize=8)
    with picture("tail", 2, sharey=True) as axes:
        for n, color in zip(lengths, plt.cm.viridis([0.0, 0.3, 0.6, 0.85])):
            x, v, oracle = zip(*found[n]["tail"])
            axes[0].plot([100 * k for k in x], v, color=color, label=f"{n} steps, {found[n]['tokens']:.0f} tokens")
            axes[1].plot([100 * k for k in x], oracle, color=color)
        axes[0].set(title="token-level critic V_t", xlabel="% of the response read",
                    ylabel="P(V_t of a right response\n> V_t of a wrong one)")
        axes[1].set(title="an oracle that sees each mistake", xlabel="% of the response read")
        axes[0].legend(fontsize=8)


def write_csv(curves: dict, values: dict, found: dict, file: Path) -> None:
    with open(file, "w", newline="") as handle:
        table = csv.writer(handle)
        table.writerow(["picture", "series", "run", "x", "y", "seconds"])
        for (name, lr), runs in curves.items():
            for seed, points in enumerate(runs):
                table.writerows(["compare", name, f"lr {lr} seed {seed}", n, f"{a:.6f}", f"{s:.2f}"]
                                for n, s, a in points)
        for name, (V, rate) in values.items():
            table.writerows(["value", name, "", f"{v:.4f}", f"{r:.4f}", ""] for v, r in zip(V.tolist(), rate.tolist()))
        for n, f in found.items():
            for name, numbers in f["methods"].items():
                table.writerows(["advantage", name, f"{n or 'toy'} steps", key, f"{x:.4f}", ""]
                                for key, x in numbers.items())
            for x, v, oracle in f["tail"]:
                table.writerows([["tail", "V_t", f"{n or 'toy'} steps", x, f"{v:.4f}", ""],
                                 ["tail", "oracle", f"{n or 'toy'} steps", x, f"{oracle:.4f}", ""]])


# ------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/compare")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(args.jobs)
    toys = {} if args.quick else {n: pool.submit(make_chain, args.out, n) for n in CHAINS}
    stills = {} if args.quick else {(n, a): pool.submit(still, args.out, n, a, toys.get(n)) for n in (0, *CHAINS)
                                    for a in ("sppo", "ppo")}
    rates = {name: lr for name, (_, _, lr) in ALGORITHMS.items()}
    if not args.quick:
        grid = {(name, lr): pool.submit(race, args.out, name, lr, 100) for name in ALGORITHMS for lr in GRID}
        means = {key: area(curve(job.result())) for key, job in grid.items()}
        rates = {name: max(GRID, key=lambda lr: means[name, lr]) for name in ALGORITHMS}
        for name in ALGORITHMS:
            print(f"grid: {name}: " + ", ".join(f"{lr}: {means[name, lr]:.3f}" for lr in GRID))
    jobs = {(name, seed): pool.submit(race, args.out, name, rates[name], seed)
            for seed in range(2 if args.quick else args.seeds) for name in ALGORITHMS}
    curves = {(name, rates[name]): [curve(job.result()) for (other, _), job in jobs.items() if other == name]
              for name in ALGORITHMS}
    values, found = {}, {}
    if not args.quick:
        found = {n: measure(stills[n, "sppo"].result(), stills[n, "ppo"].result()) for n in (0, *CHAINS)}
        values["beside a still policy"] = torch.tensor(found[0]["V"]), torch.tensor(found[0]["rate"])
        for step in (15, 60):
            run = load_run(jobs["SPPO", 0].result(), f"checkpoint-{step:06d}")
            values[f"in a race, step {step}"] = value_and_solve_rate(*run, samples=32)
    folder = args.out if args.quick else ROOT / "assets"
    folder.mkdir(exist_ok=True)
    write_csv(curves, values, found, folder / "compare.csv")
    draw(curves, values, found, folder)
    curves_table(curves)
    if found:
        measured_tables(found)
    print(f"wrote compare.csv and pictures to {folder}")


if __name__ == "__main__":
    main()
