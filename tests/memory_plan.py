#!/usr/bin/env python3
"""What a run needs in memory, from the shapes in the model's config.json alone: `python sppo.py --model ... --plan`.

    P parameters      weights 4 P, AdamW's two averages 8 P, gradients 4 P bytes: everything kept is float32
    c bytes a number  of what is computed: 2 under bfloat16 autocast on a GPU, 4 on a CPU
    three phases      sampling | policy update | critic update; weights and averages of both models are there in each,
                      gradients only in their own model's update. The run needs the largest sum, not the sum of all.

Every update is followed through its moments (end of the forward pass, backward pass through the head, through the
layers, through the embedding, optimizer step), and the largest is taken. Lengths are the longest that the settings
allow: real prompts are shorter, so real peaks are lower. tests/test_memory.py holds this against measured peaks.
"""

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # sppo.py

GB = 2**30
CHUNK = 2**25  # logits that exist at a time: chunk_logits of sppo.token_log_probs
CARDS = (12, 16, 24)


@dataclass
class Shape:
    vocabulary: int
    width: int  # D
    mlp: int  # I, the inner width of the MLP
    layers: int
    kv_width: int  # numbers in the keys of one token: key-value heads times head width
    q_width: int  # the same for the queries
    tied: bool  # is the head the embedding?

    @property
    def layer(self) -> int:
        """Weights of one block: attention (q, k, v with bias; o), a gated MLP, two norms."""
        attention = self.width * (2 * self.q_width + 2 * self.kv_width) + self.q_width + 2 * self.kv_width
        return attention + 3 * self.width * self.mlp + 2 * self.width

    @property
    def table(self) -> int:
        return self.vocabulary * self.width


# The models of the recipes, so that a plan needs no network.
KNOWN = {
    "Qwen2.5-0.5B": Shape(151_936, 896, 4_864, 24, 128, 896, True),
    "Qwen2.5-1.5B": Shape(151_936, 1_536, 8_960, 28, 256, 1_536, True),
    "DeepSeek-R1-Distill-Qwen-1.5B": Shape(151_936, 1_536, 8_960, 28, 256, 1_536, False),
    "DeepSeek-R1-Distill-Qwen-7B": Shape(152_064, 3_584, 18_944, 28, 512, 3_584, False),
}


def trainer():
    """The module sppo: itself `__main__` where this was called by `python sppo.py --plan`."""
    if hasattr(sys.modules["__main__"], "UserError"):
        return sys.modules["__main__"]
    import sppo
    return sppo


def shape_of(name: str, trust_remote_code: bool = False) -> Shape:
    """The shape of a local folder, of a model in the table above, or of one on the hub (its config.json alone)."""
    sppo = trainer()
    source = sppo.resolve(name)
    known = source.rpartition("/")[2].removesuffix("-Instruct")
    if not Path(source).is_dir() and known in KNOWN:
        return KNOWN[known]
    from transformers import AutoConfig
    try:
        c = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
        heads = c.num_attention_heads
        head_width = getattr(c, "head_dim", None) or c.hidden_size // heads
        mlp = getattr(c, "intermediate_size", None) or 4 * c.hidden_size
        return Shape(c.vocab_size, c.hidden_size, mlp, c.num_hidden_layers,
                     (getattr(c, "num_key_value_heads", None) or heads) * head_width, heads * head_width,
                     bool(getattr(c, "tie_word_embeddings", False)))
    except Exception as error:  # no network, no such model, a config without these sizes
        raise sppo.UserError(f"--plan: the sizes of {name} cannot be read: {sppo.first_line(error)}") from None


def parameters(s: Shape, layers: int, head: bool) -> int:
    """Embedding, blocks, final norm, and the head where it is a table of its own. (A critic's head is D + 1.)"""
    return s.table + layers * s.layer + s.width + (s.table if head and not s.tied else 0)


# ------------------------------------------------------------------------------------- activations, bytes a token


def kept_by_a_layer(s: Shape, c: int) -> int:
    """What one block keeps for its backward pass.

    Eight numbers a token of width D: the residual stream and its normed copy before attention and before the MLP (4),
    the input of q, k, v and that of gate, up (2), the queries, the output of attention. Keys and values. Four of width
    I: gate, silu(gate), up and their product. Under autocast the first four stay float32, and q, k, v and gate, up
    each keep a bfloat16 copy of their input.
    """
    wide = 4 * 4 * s.width + (2 * c if c == 4 else 5 * c) * s.width + 2 * c * s.q_width
    return wide + 2 * c * s.kv_width + 4 * c * s.mlp


def used_by_a_layer(s: Shape, c: int) -> int:
    """What one block needs for a moment, backward or forward: three of the MLP's inner width, four of D in float32."""
    return 3 * c * s.mlp + 4 * 4 * s.width


# ------------------------------------------------------------------------------------------------------- the plan


def plan(cfg, policy: Shape | None = None, critic: Shape | None = None) -> dict:
    """{phase: {item: bytes}} for one process; the sum of a phase is its peak. Shapes are looked up unless given."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    policy = policy or shape_of(cfg.model, cfg.trust_remote_code)
    has_critic = cfg.algorithm in ("sppo", "ppo")
    critic = critic or (shape_of(cfg.critic_model, cfg.trust_remote_code) if cfg.critic_model else policy)
    critic_layers = min(cfg.critic_layers or critic.layers, critic.layers)
    on_gpu = cfg.device.startswith("cuda")
    c = 2 if on_gpu else 4
    P = parameters(policy, policy.layers, head=True)
    P_critic = parameters(critic, critic_layers, head=False) + critic.width + 1 if has_critic else 0

    whole_row = cfg.max_prompt_tokens + cfg.max_response_tokens
    copies = cfg.copies
    batch = math.ceil(cfg.batch_size / world) * copies  # rows of this process
    mini = math.ceil(min(cfg.mini_batch_size, cfg.batch_size) / world) * copies
    kept = {"policy: weights": 4 * P // world, "policy: AdamW's averages": 8 * P // world,
            "critic: weights": 4 * P_critic // world, "critic: AdamW's averages": 8 * P_critic // world}

    rows = max(1, min(batch, cfg.sample_batch_tokens // whole_row))
    read = rows * cfg.max_prompt_tokens if rows < 32 else max(rows * cfg.max_prompt_tokens, rows // 2 * whole_row)
    key = 4  # the rotation of the keys is float32 even under autocast; values are not
    sampling = kept | {
        "compute copies of the weights": gathered_copies(P + P_critic if world > 1 else P, c, world),
        "KV cache": rows * whole_row * policy.kv_width * (key + c) * (policy.layers + 1),  # + 1: the one that grows
        "reading the prompts": read * (used_by_a_layer(policy, c) + (key + 2 * c) * policy.q_width),
        "logits": 4 * 4 * rows * policy.vocabulary,
    }
    update = updating(policy, policy.layers, P, mini, whole_row, cfg, c, world, head=True)
    phases = {"sampling": sampling, "policy update": kept | update}
    if has_critic:
        row = whole_row if cfg.algorithm == "ppo" else cfg.max_prompt_tokens
        update = updating(critic, critic_layers, P_critic, mini, row, cfg, c, world, head=False)
        phases["critic update"] = kept | update
    return phases


def gathered_copies(P: int, c: int, world: int) -> int:
    """Copies of P weights to compute with. One process: what autocast makes (none in float32). Several: what FSDP
    gathers from the others, in the dtype that is computed with."""
    return c * P if world > 1 or c == 2 else 0


def updating(s: Shape, layers: int, P: int, rows: int, row: int, cfg, c: int, world: int,
             head: bool) -> dict:
    """What one model's update adds to the weights and averages: its largest moment, item by item."""
    tokens = max(row, min(cfg.micro_batch_tokens, rows * row))  # of a micro-batch
    several = rows * row > tokens  # several micro-batches: from the second on, the gradients are there from the start
    gradients = 4 * P // world
    table = 4 * s.table  # the gradient of an embedding or of a head is a whole table
    head_table = table if head else 0

    if cfg.gradient_checkpointing:  # only each block's input is kept; one block at a time is made again
        stored, one_block = layers * 4 * s.width * tokens, kept_by_a_layer(s, c) * tokens
    else:
        stored, one_block = layers * kept_by_a_layer(s, c) * tokens, 0
    stored += 4 * 4 * s.width * tokens  # embedding, final norm, the states that the head reads
    inside = used_by_a_layer(s, c) * tokens

    positions = min(tokens, tokens // row * cfg.max_response_tokens) if head else 0
    per_chunk = min(positions, max(1, CHUNK // s.vocabulary))
    logits = 3 * 4 * per_chunk * s.vocabulary  # log-probs, and two more while entropy or gradient are made
    sums = 2 if positions > per_chunk else 1  # the head's gradient: the sum so far, and one chunk's

    linear = P - (0 if head and s.tied else s.table)  # an embedding is looked up, it needs no copy
    if world > 1:  # FSDP: two blocks at a time, and what belongs to no block
        linear = 2 * s.layer + s.table * (2 if head and not s.tied else 1)
    copied = gathered_copies(linear, c, world)
    kept_copies = 0 if cfg.gradient_checkpointing and world == 1 else copied  # else the graph holds on to them
    earlier = gradients if several else 0

    moments = [  # gradients, copies, activations, workspace
        ("forward", earlier, copied, stored, max(inside, logits)),
        ("backward: head", earlier + head_table * sums, kept_copies, stored, logits),
        ("backward: blocks", earlier + head_table, kept_copies, stored + one_block, inside),
        ("backward: embedding", gradients + table * (2 if several and head and s.tied else 1), 0, 0, 0),
        ("optimizer step", gradients, 0, 0, 0),  # fused: AdamW makes no copies
    ]
    _, *largest = max(moments, key=lambda m: sum(m[1:]))
    return dict(zip(("gradients", "compute copies of the weights", "activations", "workspace"), largest))


# ------------------------------------------------------------------------------------------------------ the table


def peak(phases: dict) -> int:
    return max(sum(items.values()) for items in phases.values())


def fitting(cfg, card: int, policy: Shape, critic: Shape):
    """The first settings that fit a card of that many GB, starting from the ones asked for: (peak, changes) or None.

    Tried in the order of what they cost: smaller batches only time, checkpointing a third more time in the update, a
    shallower critic perhaps quality.
    """
    room = (card - 0.6) * GB * 0.95  # CUDA's own context, and holes between the pieces
    asked = cfg.critic_layers or critic.layers
    depths = [asked] + [k for k in (critic.layers // 2, critic.layers // 4) if k < asked]
    longest = cfg.max_prompt_tokens + cfg.max_response_tokens
    tries = [(depth, recompute, micro, together)
             for depth in (depths if cfg.algorithm in ("sppo", "ppo") else depths[:1])
             for recompute in sorted({cfg.gradient_checkpointing, True})
             for micro in sorted({min(m, cfg.micro_batch_tokens) for m in (cfg.micro_batch_tokens, 8192, 4096, 2048)
                                  if m >= longest or m == cfg.micro_batch_tokens}, reverse=True)
             for together in sorted({min(t, cfg.sample_batch_tokens) for t in (cfg.sample_batch_tokens, 65536, 32768)},
                                    reverse=True)]
    for depth, recompute, micro, together in tries:
        other = replace(cfg, critic_layers=depth if depth < critic.layers else 0, gradient_checkpointing=recompute,
                        micro_batch_tokens=micro, sample_batch_tokens=together)
        needed = peak(plan(other, policy, critic))
        if needed <= room:
            changed = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
                       for name in ("critic_layers", "gradient_checkpointing", "micro_batch_tokens",
                                    "sample_batch_tokens")
                       if (value := getattr(other, name)) != getattr(cfg, name)]
            return needed, changed
    return None


def print_plan(cfg) -> None:
    policy = shape_of(cfg.model, cfg.trust_remote_code)
    critic = shape_of(cfg.critic_model, cfg.trust_remote_code) if cfg.critic_model else policy
    world, phases = int(os.environ.get("WORLD_SIZE", 1)), plan(cfg, policy, critic)
    layers = min(cfg.critic_layers or critic.layers, critic.layers)
    how = "bfloat16 over float32 weights" if cfg.device.startswith("cuda") else "float32"
    print(f"{cfg.algorithm} on {cfg.model}, {cfg.device}, {how}, {world} process(es); 1 GB = 2^30 bytes")
    print(f"policy {parameters(policy, policy.layers, True) / 1e6:.0f} M parameters"
          + (f", critic {parameters(critic, layers, False) / 1e6:.0f} M ({layers} of {critic.layers} layers)"
             if "critic update" in phases else ", no critic")
          + f"; up to {cfg.max_prompt_tokens} + {cfg.max_response_tokens} tokens a row, {cfg.micro_batch_tokens} a "
          f"micro-batch, gradient checkpointing {'on' if cfg.gradient_checkpointing else 'off'}\n")
    items = list(dict.fromkeys(item for phase in phases.values() for item in phase))
    print(f"{'GB' + (' in each process' if world > 1 else ''):32}" + "".join(f"{phase:>16}" for phase in phases))
    for item in items:
        print(f"{item:32}" + "".join(f"{phase.get(item, 0) / GB:16.2f}" for phase in phases.values()))
    print(f"{'sum':32}" + "".join(f"{sum(phase.values()) / GB:16.2f}" for phase in phases.values()))
    print(f"\npeak {peak(phases) / GB:.1f} GB" + (", and 1 GB for CUDA" if cfg.device[:4] == "cuda" else ""))
    card_cfg = replace(cfg, device="cuda", micro_batch_tokens=16384 if cfg.device[:4] != "cuda" and
                       cfg.micro_batch_tokens == 8192 else cfg.micro_batch_tokens)
    print(f"\non {'GPUs' if world > 1 else 'a GPU'} in bfloat16 with at most 16384 tokens a micro-batch:")
    for card in CARDS:
        found = fitting(card_cfg, card, policy, critic)
        words = "does not fit: a smaller model, a shorter --max-response-tokens or more GPUs" if found is None else (
            f"fits, {found[0] / GB:.1f} GB, with {' '.join(found[1]) or 'these settings'}")
        print(f"  {card} GB  {words}")
