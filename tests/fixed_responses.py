"""Runs sppo.py with the sampler replaced by a fixed table of responses, so that 1 and 2 processes see the same batch.

    torchrun --nproc-per-node 2 tests/fixed_responses.py FLAGS OF sppo.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sppo


def fixed_sample(ro, policy, tok, cfg, greedy=False):
    """Responses that depend on the problem alone, of uneven lengths; about half of them right."""
    ro.texts, ro.responses = [], []
    for p in ro.problems:
        draw = sum(map(int, filter(str.isdigit, p.text)))
        text = "1+2=3\n" * (draw % 4) + "\\boxed{" + (p.gold if draw % 2 else "7") + "}"
        ro.texts.append(text)
        ro.responses.append(torch.tensor(sppo.plain_ids(tok, text) + [min(tok.end_ids)]))
    ro.cut = [False] * len(ro.problems)


if __name__ == "__main__":
    sppo.sample = fixed_sample
    sys.exit(sppo.main())
