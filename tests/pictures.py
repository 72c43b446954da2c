#!/usr/bin/env python3
"""Pictures and numbers of tutorial.md, from this version of the code (matplotlib needed; some 6 minutes on 2 cores).

    python tests/pictures.py            # assets/clip.png, gae.png, runs.png, and the worked example as text
    python tests/pictures.py --by-hand  # the worked example alone: one response from prompt ids to the gradient's sign
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import sppo

RUNS = {  # what is drawn in runs.png: flags on top of the toy's recipe
    "good": [],
    "stuck: every answer is cut off": ["--max-response-tokens", "12", "--steps", "60", "--critic-warmup", "0"],
    "collapsing: --lr 1e-2": ["--lr", "1e-2", "--steps", "60", "--critic-warmup", "0"],
}


def by_hand(problem: int = 6) -> None:
    """Follows two responses to one prompt, a right one and one with a single mistake, from ids to the step's effect."""
    cfg = sppo.parse(["--device", "cpu", "--lr", "1e-4", "--batch-size", "1", "--mini-batch-size", "1",
                      "--critic-warmup", "0"])
    policy, critic, tok, critic_tok = sppo.build(cfg)
    problems = sppo.load_problems(cfg.eval_dataset, "test", cfg, tok, critic_tok)
    critic.start_at(0.57)
    for wanted, part in ((1, ""), (0, "45-19=26")):  # the wrong one forgets the carry, and goes on correctly
        seed = 0
        while True:
            sppo.seed_everything(seed, 1)
            ro = sppo.Rollout([problems[problem]])
            sppo.sample(ro, policy, tok, cfg)
            sppo.verify(ro)
            if ro.reward.item() == wanted and part in ro.texts[0]:
                break
            seed += 1
        sppo.value(ro, critic, cfg)
        sppo.advantage(ro, cfg)
        ro.old_log_probs = [None]
        before = sppo.policy_forward(policy, ro, [0])[0].detach()
        start = {name: w.clone() for name, w in policy.state_dict().items()}
        optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr)
        sppo.policy_step(policy, optimizer, ro, cfg, [0], sppo.Counter())
        after = sppo.policy_forward(policy, ro, [0])[0].detach()
        policy.load_state_dict(start)
        P, T = len(ro.problems[0].ids), len(ro.responses[0])
        print(f"prompt    {ro.problems[0].text!r}   ids {ro.problems[0].ids.tolist()}   gold {ro.problems[0].gold}\n"
              f"response  {ro.texts[0]!r}   {T} tokens, end token included\n"
              f"one row of {P + T} ids: the response stands in columns {P} to {P + T - 1}; the states in columns {P - 1} to "
              f"{P + T - 2} predict it\n"
              f"R = {ro.reward.item():.0f}   V = {torch.cat(ro.value).item():.2f}   "
              f"A = R - V = {ro.advantage[0][0].item():+.2f}, for each token")
        unsure = [t for t in range(len(before)) if before[t] < -0.01][:9]
        print("its unsure tokens (probability below 0.99), by place in the response:")
        print("  place        " + "".join(f"{t + 1:8}" for t in unsure))
        print("  token        " + "".join(f"{tok.decode(ro.responses[0][t : t + 1])!r:>8}" for t in unsure))
        print("  log pi before" + "".join(f"{before[t]:8.3f}" for t in unsure))
        print("  log pi after " + "".join(f"{after[t]:8.3f}" for t in unsure))
        print(f"sum over the response: {before.sum():.3f} -> {after.sum():.3f}\n")


def run(name: str, flags: list[str], folder: Path) -> list[dict]:
    out = folder / name.split(":")[0]
    if not (out / "curve.png").exists():
        subprocess.run(["rm", "-rf", str(out)], check=True)
        subprocess.run([sys.executable, str(ROOT / "sppo.py"), "--out", str(out), *flags], check=True,
                       capture_output=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/pictures")
    args = parser.parse_args()
    sppo.say = lambda *words: None
    sppo.verifier.start()
    by_hand()
    sppo.verifier.stop()
    if args.by_hand:
        return
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    assets = ROOT / "assets"
    assets.mkdir(exist_ok=True)

    def figure(rows: int, columns: int, **how):
        fig, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3 if rows == 1 else 2.1 * rows),
                                 layout="constrained", **how)
        for ax in axes.flat:
            ax.grid(alpha=0.3)
        return fig, axes

    fig, axes = figure(1, 2)
    ratio = torch.linspace(0.01, 4, 400)
    for ax, A in zip(axes, (1.0, -1.0)):
        for dual, style in ((0.0, "-"), (3.0, "--")):
            objective, _, _ = sppo.clipped_surrogate(ratio.log(), torch.zeros(400), torch.full((400,), A), 0.2, dual)
            if not dual or A < 0:
                ax.plot(ratio, objective, style, label="as in the paper" if not dual else "with --dual-clip 3")
        ax.axvspan(*((1.2, 4) if A > 0 else (0, 0.8)), color="gray", alpha=0.2, lw=0, label="no gradient")
        ax.set(title=f"A = {A:+.0f}", xlabel="ratio r_t", ylabel="clipped objective", xlim=(0, 4))
        ax.legend(fontsize=8)
    fig.savefig(assets / "clip.png", dpi=100, facecolor="white")

    fig, axes = figure(1, 2)
    for lam in (0.9, 0.95, 0.99, 1.0):
        for ax, T in zip(axes, (30, 1000)):
            A = sppo.gae_advantage(1.0, torch.zeros(T, dtype=torch.float64), 1.0, lam)
            ax.plot(range(1, T + 1), A, label=f"lambda {lam}")
            print(f"GAE of one reward 1 after T = {T} tokens, V = 0, lambda {lam}: A_1 = {A[0].item():.2g}")
    for ax in axes:
        ax.set(xlabel="token t of the response", ylabel="A_t", ylim=(0, 1.05))
        ax.legend(fontsize=8)
    fig.savefig(assets / "gae.png", dpi=100, facecolor="white")

    runs = {name: run(name, flags, args.runs) for name, flags in RUNS.items()}
    keys = {"R and V": ("reward", "value"), "entropy, nats per token": ("entropy",),
            "critic's loss, nats": ("value_bce", "value_bce_constant"), "shares": ("clip_share", "cut_share")}
    fig, axes = figure(len(keys), len(runs), sharex="col", sharey="row")
    for number, (column, (name, rows)) in enumerate(zip(axes.T, runs.items())):
        rows = [r for r in rows if "reward" in r]
        for ax, (label, names) in zip(column, keys.items()):
            for key in names:
                ax.plot([r["step"] for r in rows], [r.get(key) for r in rows], label=key)
            ax.legend(fontsize=7)
            if number == 0:
                ax.set_ylabel(label)
        column[0].set_title(name, fontsize=10)
        column[-1].set_xlabel("step")
    fig.savefig(assets / "runs.png", dpi=90, facecolor="white")
    for name, rows in runs.items():
        last = rows[-1]
        print(f"{name}: " + ", ".join(f"{k} {last[k]:.3f}" for k in ("reward", "value", "entropy", "value_bce", "kl",
                                                                     "clip_share", "cut_share")))


if __name__ == "__main__":
    main()
