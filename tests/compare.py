#!/usr/bin/env python3
"""The paper's comparison on the toy: every --algorithm with the same number of sampled responses.

    python tests/compare.py                  # learning-rate grid, then 5 seeds each; resumable; half an hour on 2 cores
    python tests/compare.py --quick          # 2 seeds, rates from the table below; under 10 minutes
    python tests/compare.py --draw           # only the pictures and tables, from the runs that are there

Runs go to runs/compare (finished ones are not repeated). Writes assets/compare.csv (a row a run and evaluation) and
assets/compare.png, and prints the table of the README.
"""

import argparse
import csv
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import sppo

RESPONSES, MINI, STEPS = 128, 32, 40  # responses a step, responses an optimizer step, steps
ALGORITHMS = {  # the flags that make each of them sample RESPONSES responses a step (ReMax's greedy ones counted)
    "sppo": ["--batch-size", str(RESPONSES), "--mini-batch-size", str(MINI)],
    "sppo, 1-layer critic": ["--algorithm", "sppo", "--critic-layers", "1", "--batch-size", str(RESPONSES),
                             "--mini-batch-size", str(MINI)],
    "ppo": ["--algorithm", "ppo", "--batch-size", str(RESPONSES), "--mini-batch-size", str(MINI)],
    "grpo": ["--algorithm", "grpo", "--batch-size", str(RESPONSES // 8), "--mini-batch-size", str(MINI // 8)],
    "rloo": ["--algorithm", "rloo", "--batch-size", str(RESPONSES // 8), "--mini-batch-size", str(MINI // 8)],
    "remax": ["--algorithm", "remax", "--batch-size", str(RESPONSES // 2), "--mini-batch-size", str(MINI // 2)],
    "reinforce": ["--algorithm", "reinforce", "--batch-size", str(RESPONSES), "--mini-batch-size", str(MINI)],
}
GRID = ("1.5e-4", "3e-4", "6e-4")  # the same small grid of policy learning rates for all; seed 100 decides


def one_run(name: str, lr: str, seed: int, folder: Path) -> list[dict]:
    """The metrics of one run; it is trained unless it has finished before."""
    out = folder / f"{name.replace(', ', '-')}-lr{lr}-seed{seed}"
    if not (out / f"checkpoint-{STEPS:06d}").is_dir():
        flags = ["--out", str(out), "--steps", str(STEPS), "--seed", str(seed), "--lr", lr, "--critic-warmup", "0",
                 "--eval-every", "5", "--eval-samples", "2", "--no-eval-greedy", "--show-every", "1000",
                 "--save-every", str(STEPS // 2), *ALGORITHMS[name]]
        if (out / "config.json").exists():
            flags = ["--resume", str(out)] if any(out.glob("checkpoint-*")) else flags
            if flags[0] == "--out":
                sppo.shutil.rmtree(out)  # stopped before its first checkpoint: begin again
        if sppo.main(flags) != 0:
            sys.exit(f"compare.py: the run {out} failed")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(rows: list[dict]) -> list[tuple[int, float, float]]:
    """(responses sampled, seconds of training, accuracy) at each evaluation; evaluating itself is not counted."""
    points, seconds = [], 0.0
    for row in rows:
        seconds += sum(v for k, v in row.items() if k.startswith("seconds/") and k != "seconds/evaluate")
        if "eval/accuracy" in row:
            points.append((row["step"] * RESPONSES, seconds, row["eval/accuracy"]))
    return points


def reaches(points: list[tuple], goal: float, axis: int) -> float:
    """Where on the axis (0 responses, 1 seconds) the accuracy first reaches the goal; infinite if never."""
    return next((p[axis] for p in points if p[2] >= goal), float("inf"))


def area(points: list[tuple]) -> float:
    """Mean accuracy over the run's evaluations: how fast and how far it learned, in one number."""
    return statistics.mean(p[2] for p in points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/compare")
    args = parser.parse_args()
    seeds = range(2 if args.quick else args.seeds)
    chosen_file = args.out / "rates.json"
    args.out.mkdir(parents=True, exist_ok=True)
    rates = json.loads(chosen_file.read_text()) if chosen_file.exists() else {}
    for name in ALGORITHMS if not (args.quick or args.draw) else ():
        if name not in rates:
            rates[name] = max(GRID, key=lambda lr: area(curve(one_run(name, lr, 100, args.out))))
            chosen_file.write_text(json.dumps(rates))
    curves = {name: [] for name in ALGORITHMS}
    for seed in seeds:  # seed by seed, so that a run cut short is balanced
        for name in ALGORITHMS:
            lr = rates.get(name, TUNED[name])
            if args.draw and not (args.out / f"{name.replace(', ', '-')}-lr{lr}-seed{seed}/checkpoint-{STEPS:06d}").is_dir():
                continue
            curves[name].append((seed, lr, curve(one_run(name, lr, seed, args.out))))
    write(curves, ROOT / "assets" if not args.quick else args.out)


def write(curves: dict, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with open(folder / "compare.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["algorithm", "seed", "lr", "responses", "seconds", "accuracy"])
        for name, runs in curves.items():
            for seed, lr, points in runs:
                table.writerows([name, seed, lr, n, f"{s:.2f}", f"{a:.4f}"] for n, s, a in points)
    print(f"\n| algorithm | lr | accuracy at the end | mean over the run | responses to 0.9 | seconds to 0.9 |\n"
          f"|---|---|---|---|---|---|")
    for name, runs in curves.items():
        ends, areas = [r[2][-1][2] for r in runs], [area(r[2]) for r in runs]
        spread = lambda x: f"{statistics.mean(x):.3f} ± {statistics.stdev(x):.3f}"
        median = lambda x: f"{statistics.median(x):.0f}" if statistics.median(x) < float("inf") else "not reached"
        print(f"| {name} | {runs[0][1]} | {spread(ends)} | {spread(areas)} | "
              f"{median([reaches(r[2], 0.9, 0) for r in runs])} | {median([reaches(r[2], 0.9, 1) for r in runs])} |")
    try:
        import matplotlib
    except ImportError:
        return print("matplotlib is not installed: no picture drawn")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    fig, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for (name, runs), color in zip(curves.items(), plt.cm.tab10.colors):
        for ax, axis in zip(axes, (0, 1)):
            columns = list(zip(*[r[2] for r in runs]))  # one entry an evaluation: the same point of each seed
            x = [statistics.mean(p[axis] for p in c) for c in columns]
            y = [statistics.mean(p[2] for p in c) for c in columns]
            sd = [statistics.stdev(p[2] for p in c) for c in columns]
            ax.plot(x, y, color=color, label=name, lw=2 if name == "sppo" else 1.2)
            ax.fill_between(x, [a - s for a, s in zip(y, sd)], [a + s for a, s in zip(y, sd)], color=color, alpha=0.12)
    axes[0].set(xlabel="responses sampled", ylabel="accuracy on held-out problems (sampled, T = 1)")
    axes[1].set(xlabel="seconds of training (2 CPU cores)")
    axes[0].legend(fontsize=8)
    for ax in axes:
        ax.grid(alpha=0.3)
    fig.savefig(folder / "compare.png", dpi=110, bbox_inches="tight", facecolor="white")
    print(f"wrote {folder / 'compare.csv'} and {folder / 'compare.png'}")


# What the grid chose when the README's table was made.
TUNED = {name: "3e-4" for name in ALGORITHMS}

if __name__ == "__main__":
    main()
