"""What must hold in sppo.py and value_head.py: the mathematics in closed form, then the loop on tiny models."""

import ast
import dataclasses
import itertools
import json
import math
import signal
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM

import rigged
import sppo
from rigged import BOX, CLOSE, END, EQUALS, NEWLINE, ZERO, chain, config, fixed_rollout, problem, sgd, weights
from value_head import Critic, value_loss

SEVEN = ZERO + 7


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """One thread and a fixed seed; the verifier's worker outlives a run; signal handlers are put back."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.setattr(sppo.verifier, "start", lambda: None)
    monkeypatch.setattr(sppo.verifier, "stop", lambda: None)
    yield
    torch.set_num_threads(threads)
    for s, handler in handlers.items():
        signal.signal(s, handler)


@pytest.fixture(scope="session")
def awkward(tmp_path_factory):
    """A random model whose folder asks for everything that must not happen: dropout, and a distorted sampler."""
    return rigged.write_model(tmp_path_factory.mktemp("awkward"), dropout=0.5, nasty=True, vocab=24, template=True)


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    return rigged.write_model(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def rig(tmp_path):
    """rig(table, ...) -> policy and tokenizer of a rigged model, and the settings."""

    def make(table, folder=None, **settings):
        model = rigged.write_model(tmp_path / "rigged", table, **(folder or {}))
        cfg = config(model, algorithm="reinforce", **settings)
        policy, _, tok, _ = sppo.build(cfg)
        return policy, tok, cfg

    return make


# ------------------------------------------------------------------------------------------------- mathematics


def test_at_ratio_one_the_surrogate_has_the_gradient_of_the_expected_reward_whatever_the_baseline():
    """E over all 27 responses of three tokens: the sum over tokens of r_t (R - V) has the gradient of E[R]."""
    theta = torch.randn(4, 3, dtype=torch.double, requires_grad=True)  # logits after: start, token 0, 1, 2
    rewards = (torch.rand(3, 3, 3) < 0.4).double()
    log_pi = theta.log_softmax(-1)
    for V in (0.0, 0.3, 1.0):
        expected_reward = surrogate = 0.0
        for a in itertools.product(range(3), repeat=3):
            log_probs = torch.stack([log_pi[last + 1, token] for last, token in zip((-1, *a), a)])
            p, A = log_probs.sum().exp(), sppo.sppo_advantage(rewards[a], torch.tensor(V))
            objective, ratio, clipped = sppo.clipped_surrogate(log_probs, log_probs.detach(), A.expand(3), 0.2)
            assert (ratio == 1).all() and not clipped.any()
            expected_reward, surrogate = expected_reward + p * rewards[a], surrogate + p.detach() * objective.sum()
        want, = torch.autograd.grad(expected_reward, theta, retain_graph=True)
        got, = torch.autograd.grad(surrogate, theta, retain_graph=True)
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
@pytest.mark.parametrize("A", [-2.0, -0.5, 0.0, 0.5, 2.0])
def test_the_clip_takes_the_gradient_away_exactly_where_the_paper_says(A, dual_clip):
    ratios = torch.tensor([0.01, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0, 2.99, 3.01, 50.0], dtype=torch.double)
    log_probs = ratios.log().requires_grad_()
    advantage = torch.full_like(ratios, A)
    objective, ratio, clipped = sppo.clipped_surrogate(log_probs, torch.zeros_like(ratios), advantage, 0.2, dual_clip)
    gone = ratios > 1.2 if A > 0 else ratios < 0.8
    want = torch.where(gone, (1.2 if A > 0 else 0.8) * advantage, ratios * advantage)
    if dual_clip and A < 0:
        gone, want = gone | (ratios > 3), torch.where(ratios > 3, 3 * advantage, want)
    torch.testing.assert_close(ratio, ratios)
    torch.testing.assert_close(objective, want)
    objective.sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.where(gone, 0.0, ratios * advantage))
    assert clipped.tolist() == (gone.tolist() if A else [False] * len(ratios))


@pytest.mark.parametrize("A", [-1.0, 1.0])
@pytest.mark.parametrize("old", [-200.0, 0.0])
def test_an_extreme_ratio_gives_a_finite_gradient(A, old):
    log_probs = torch.tensor([-0.1 if old else -200.0, -1.0], requires_grad=True)
    objective, ratio, _ = sppo.clipped_surrogate(log_probs, torch.tensor([old, -1.0]), torch.full((2,), A), 0.2, 3.0)
    objective.sum().backward()
    assert ratio.isfinite().all() and objective.isfinite().all() and log_probs.grad[0] == 0 and log_probs.grad[1] == A


def test_the_critics_gradient_is_the_negative_advantage():
    v = torch.tensor([-30.0, -1.0, 0.0, 2.0, 30.0, 200.0], requires_grad=True)
    for R in (torch.zeros(6), torch.ones(6)):
        v.grad = None
        value_loss(v, R).sum().backward()
        torch.testing.assert_close(v.grad, -sppo.sppo_advantage(R, v.detach().sigmoid()))
    V = torch.tensor([0.1, 0.5, 0.9])
    loss = value_loss(V.logit(), torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(loss, -torch.tensor([0.1, 0.5, 0.9]).log())


def test_the_critics_loss_is_least_at_the_solve_rate():
    R = torch.tensor([1.0] * 3 + [0.0] * 7)
    V = torch.linspace(0.01, 0.99, 99)
    losses = torch.stack([value_loss(p.logit().expand(10), R).mean() for p in V])
    assert V[losses.argmin()].item() == pytest.approx(0.3, abs=1e-6)


def test_gae_against_its_definition():
    R, V = 1.0, torch.tensor([0.2, 0.5, 0.7, 0.4])
    following = torch.cat([V[1:], torch.zeros(1)])
    for gamma, lam in itertools.product((1.0, 0.9), (0.0, 0.5, 1.0)):
        delta = torch.tensor([0.0, 0.0, 0.0, R]) + gamma * following - V
        want = [sum((gamma * lam) ** k * delta[t + k] for k in range(4 - t)) for t in range(4)]
        torch.testing.assert_close(sppo.gae_advantage(R, V, gamma, lam), torch.stack(want))
    torch.testing.assert_close(sppo.gae_advantage(R, V, 1.0, 1.0), R - V)


R8 = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
ADVANTAGES = {
    "sppo": [0.2, -0.8, -0.4, 0.6, 0.5, 0.1, -0.1, -0.5],
    "grpo": [0.866025, -0.866025, -0.866025, 0.866025, 0.866025, 0.866025, -0.866025, -0.866025],
    "rloo": [2 / 3, -2 / 3, -2 / 3, 2 / 3, 2 / 3, 2 / 3, -2 / 3, -2 / 3],
    "remax": [0.0, 0.0, -1.0, 1.0, 0.0, 1.0, -1.0, 0.0],
    "reinforce": [0.75, -0.25, -0.25, 0.75, 0.75, 0.75, -0.25, -0.25],
}


@pytest.mark.parametrize("algorithm", ADVANTAGES)
def test_advantages_by_hand(algorithm):
    ro = fixed_rollout([3] * 8, [1, 2, 3, 4, 1, 2, 3, 4], R8)
    ro.value = list(torch.tensor([0.8, 0.8, 0.4, 0.4, 0.5, 0.9, 0.1, 0.5]).split(1))
    ro.greedy_reward = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    sppo.advantage(ro, config("", algorithm=algorithm, group_size=4, baseline=0.25))
    for A, want, response in zip(ro.advantage, ADVANTAGES[algorithm], ro.responses, strict=True):
        torch.testing.assert_close(A, torch.full((len(response),), want), atol=1e-5, rtol=0)
    if algorithm == "sppo":
        assert torch.cat(ro.critic_target).tolist() == R8


def test_a_group_that_agrees_teaches_grpo_and_rloo_nothing():
    for rewards in (torch.ones(4), torch.zeros(4)):
        assert sppo.grpo_advantage(rewards, 4).abs().max() == 0 and sppo.rloo_advantage(rewards, 4).abs().max() == 0


@pytest.mark.parametrize("critic_loss", ["bce", "mse"])
def test_token_level_ppo_values_each_token(critic_loss):
    ro = fixed_rollout([3, 3], [2, 3], [1.0, 0.0])
    ro.value = [torch.tensor([0.5, 0.2]), torch.tensor([0.1, 0.2, 0.3])]
    sppo.advantage(ro, config("", algorithm="ppo", critic_loss=critic_loss, lam=0.5, gamma=0.9))
    for R, V, A, target in zip((1.0, 0.0), ro.value, ro.advantage, ro.critic_target):
        torch.testing.assert_close(A, sppo.gae_advantage(R, V, 0.9, 0.5))
        discounted = R * torch.tensor([0.9, 1.0] if len(V) == 2 else [0.81, 0.9, 1.0])
        torch.testing.assert_close(target, discounted if critic_loss == "bce" else A + V)


def test_log_probs_and_entropy_in_closed_form_whole_and_in_chunks():
    hidden, actions = torch.randn(11, 6, dtype=torch.double), torch.randint(0, 9, (11,))
    head = nn.Linear(6, 9, bias=False).double()
    results = []
    for chunk_logits in (2**25, 9 * 4, 9, 1):  # whole, four rows, one row, less than one row
        x = hidden.clone().requires_grad_()
        log_probs, entropy = sppo.token_log_probs(x, head, actions, 0.6, chunk_logits)
        grads = torch.autograd.grad((log_probs * torch.arange(11)).sum(), [x, head.weight])
        assert log_probs.dtype == torch.float32 and not entropy.requires_grad
        results.append([log_probs.detach(), entropy, *grads])
    p = (hidden @ head.weight.detach().T / 0.6).softmax(-1)
    torch.testing.assert_close(results[0][0], p[range(11), actions].log().float())
    torch.testing.assert_close(results[0][1], -(p * p.log()).sum(-1).float())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


# ------------------------------------------------------------------------------------------- sampling and scoring

DIGITS = {d: {(d + 1 - ZERO) % 10 + ZERO: 0.9, END: 0.1} for d in range(ZERO, ZERO + 10)}  # counts up, then may end


def surprise(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's chi-square of counts against probabilities, as standard deviations above what chance gives."""
    assert counts[p == 0].sum() == 0
    expected, counts = (counts.sum() * p)[p > 0], counts[p > 0]
    degrees = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum().item() - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_are_sampled_from_the_policy_and_nothing_else(rig, temperature):
    """Neither dropout nor the folder's own temperature, top-k, top-p and repetition penalty touch the distribution."""
    p = {ZERO + 1: 0.3, ZERO + 2: 0.25, ZERO + 3: 0.2, ZERO + 4: 0.1, ZERO + 5: 0.05, END: 0.1}
    policy, tok, cfg = rig(chain({last: p for last in range(ZERO, 15)}), dict(nasty=True, dropout=0.5),
                           temperature=temperature, max_response_tokens=8)
    ro = sppo.Rollout([problem([ZERO + i % 3] * (1 + i % 5)) for i in range(800)])
    sppo.sample(ro, policy, tok, cfg)
    q = torch.zeros(18)
    q[list(p)] = torch.tensor(list(p.values())) ** (1 / temperature)
    counts = torch.bincount(torch.cat(ro.responses), minlength=18).float()
    assert surprise(counts, q / q.sum()) < 4


def test_scored_log_probs_and_entropies_are_those_of_the_chain(rig):
    table = chain(DIGITS)
    policy, tok, cfg = rig(table, temperature=0.6)
    ro = sppo.Rollout([problem([ZERO, ZERO + 3]), problem([ZERO + 5])])
    ro.responses = [torch.tensor([ZERO + 4, ZERO + 5, END]), torch.tensor([END])]
    log_probs, entropy = sppo.policy_forward(policy, ro, [0, 1])
    ends, goes_on = 0.1 ** (1 / 0.6), 0.9 ** (1 / 0.6)
    p = torch.tensor([goes_on, goes_on, ends, ends]) / (ends + goes_on)
    torch.testing.assert_close(log_probs.detach(), p.log(), atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy, -(p * p.log() + (1 - p) * (1 - p).log()), atol=1e-4, rtol=0)


def test_the_first_pass_scores_exactly_what_was_sampled(awkward):
    """Dropout in the config, T = 0.6, uneven prompts padded on the left: ratio 1, KL 0, nothing clipped."""
    cfg = config(awkward, temperature=0.6, batch_size=12, mini_batch_size=4, micro_batch_tokens=60)
    policy, critic, tok, _ = sppo.build(cfg)
    ro = sppo.Rollout([problem(torch.randint(2, 18, (n,)).tolist()) for n in range(1, 13)])
    sppo.sample(ro, policy, tok, cfg)
    sppo.verify(ro)
    ro.reward = torch.tensor([float(i % 2) for i in range(12)])
    sppo.value(ro, critic, cfg)
    sppo.advantage(ro, cfg)
    row = sppo.metrics(ro, sppo.update(policy, critic, sgd(policy, critic, lr=0.0), ro, cfg, 1), sppo.Clock())
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-5) and row["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert row["kl"] == pytest.approx(0, abs=1e-7) and row["clip_share"] == 0
    lm = AutoModelForCausalLM.from_pretrained(awkward).eval()
    for p, response, old in zip(ro.problems, ro.responses, ro.old_log_probs, strict=True):
        ids = torch.cat([p.ids, response])
        logits = lm(ids[None]).logits[0, len(p.ids) - 1:-1]
        want = (logits / 0.6).log_softmax(-1).gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(old, want.detach(), atol=1e-4, rtol=0)


def test_the_sampler_draws_from_what_is_scored_also_where_attention_matters(awkward):
    """First tokens after a padded prompt, against the softmax of a plain forward pass on the prompt alone."""
    cfg = config(awkward, temperature=0.6, max_response_tokens=1, algorithm="reinforce")
    policy, _, tok, _ = sppo.build(cfg)
    short, long = [3, 9], [5, 4, 12, 8, 14, 2, 2, 7, 12, 3, 14]
    ro = sppo.Rollout([problem(short), problem(long)] * 600)
    sppo.sample(ro, policy, tok, cfg)
    for start, prompt in enumerate((short, long)):
        p = (policy.lm(torch.tensor([prompt])).logits[0, -1] / 0.6).softmax(-1).detach()
        rare = p < 0.01  # one cell for all tokens that are expected less than six times
        counts = torch.bincount(torch.cat(ro.responses[start::2]), minlength=len(p)).float()
        cells = lambda x: torch.cat([x[~rare], x[rare].sum()[None]])
        assert surprise(cells(counts), cells(p)) < 4


def test_a_prompt_token_that_equals_padding_stays_attended(tmp_path):
    cfg = config(rigged.write_model(tmp_path, pad_is_end=True), max_response_tokens=5, algorithm="reinforce")
    policy, _, tok, _ = sppo.build(cfg)
    assert tok.pad_id == END and tok.end_ids == {END}
    prompts = [[END, 4, END, 9, END], [3, END], [6] * 12]
    ro = sppo.Rollout([problem(p) for p in prompts])
    sppo.sample(ro, policy, tok, cfg, greedy=True)
    for prompt, response in zip(prompts, ro.responses):
        ids = list(prompt)
        while len(ids) < len(prompt) + 5 and END not in ids[len(prompt):]:
            ids.append(policy.lm(torch.tensor([ids])).logits[0, -1].argmax().item())
        assert response.tolist() == ids[len(prompt):]


def test_a_response_reaches_up_to_and_including_its_first_end_token_whichever_it_is(rig):
    """Two end tokens, and padding that looks like one of them."""
    table = chain({ZERO: {ZERO: 0.5, END: 0.25, NEWLINE: 0.25}, NEWLINE: {ZERO: 1.0}, END: {ZERO: 1.0}})
    policy, tok, cfg = rig(table, dict(pad_is_end=True, ends=[END, NEWLINE]), max_response_tokens=40)
    assert tok.end_ids == {END, NEWLINE} and tok.pad_id == END
    ro = sppo.Rollout([problem([NEWLINE, END, ZERO][i % 3:]) for i in range(300)])
    sppo.sample(ro, policy, tok, cfg)
    last, lengths = torch.stack([r[-1] for r in ro.responses]), torch.tensor([len(r) for r in ro.responses])
    assert all((r[:-1] == ZERO).all() for r in ro.responses) and not any(ro.cut)
    assert surprise(torch.bincount(last, minlength=18).float(), torch.eye(18)[[END, NEWLINE]].mean(0)) < 4
    assert lengths.float().mean().item() == pytest.approx(2, abs=4 * math.sqrt(2 / 300))  # geometric, p = 1/2


def test_the_end_token_is_trained(rig):
    policy, tok, cfg = rig(chain(DIGITS))
    ro = sppo.Rollout([problem([ZERO])], [torch.tensor([END])], reward=torch.tensor([1.0]))
    sppo.advantage(ro, cfg)
    stats = sppo.update(policy, None, sgd(policy), ro, cfg, 1)
    assert stats["tokens"] == 1
    assert sppo.policy_forward(policy, ro, [0])[0].item() > ro.old_log_probs[0].item() + 0.1


@pytest.mark.parametrize("rows_at_once", [400, 50])
def test_restarting_with_the_rows_that_go_on_loses_nothing_and_changes_no_distribution(rig, monkeypatch, rows_at_once):
    """A chain that counts up from the prompt's last digit: a lost, doubled or swapped token would break the count."""
    policy, tok, cfg = rig(chain(DIGITS), max_response_tokens=64, sample_batch_tokens=rows_at_once * (5 + 64))
    calls, real = [], sppo.generate
    monkeypatch.setattr(sppo, "generate", lambda *args: calls.append(len(args[2])) or real(*args))
    ro = sppo.Rollout([problem([ZERO + i % 10] * (1 + i % 5)) for i in range(400)])
    sppo.sample(ro, policy, tok, cfg)
    assert calls[:2] == [400, calls[1]] and calls[1] <= 200 if rows_at_once == 400 else max(calls) == 50
    for i, (response, cut) in enumerate(zip(ro.responses, ro.cut, strict=True)):
        body = response.tolist() if cut else response.tolist()[:-1]
        assert body == [(i + k) % 10 + ZERO for k in range(1, len(body) + 1)]
        assert len(response) == 64 if cut else response[-1] == END
    lengths = torch.tensor([min(len(r), 63) for r in ro.responses])
    p = torch.tensor([0.0] + [0.1 * 0.9 ** (k - 1) for k in range(1, 63)] + [0.9**62])  # geometric, cut at 63
    bins = lambda x: torch.stack([part.sum() for part in x.split([8, 8, 8, 8, 32])])
    assert surprise(bins(torch.bincount(lengths, minlength=64).float()), bins(p)) < 4


def test_all_rows_go_on_until_half_of_them_have_ended():
    done = sppo.HalfDone(torch.tensor([END]), start=2)
    ids = torch.full((40, 18), ZERO)
    ids[:, :2] = END  # end tokens of the prompt do not count
    ids[:19, 5] = END
    assert not done(ids, None).any()
    ids[19, 17] = END
    assert done(ids, None).all() and not done(ids[:, :17], None).any() and not done(ids[:31], None).any()


def test_a_response_cut_off_at_the_limit_earns_nothing(rig):
    """The right answer stands in a box, but the response never ends: reward 0, length 4, cut share 1."""
    table = chain({EQUALS: {BOX: 1.0}, BOX: {SEVEN: 1.0}, SEVEN: {CLOSE: 1.0}, CLOSE: {EQUALS: 1.0}})
    policy, tok, cfg = rig(table, max_response_tokens=4)
    ro = sppo.Rollout([problem([ZERO, EQUALS])] * 3)
    sppo.sample(ro, policy, tok, cfg)
    sppo.verify(ro)
    sppo.advantage(ro, cfg)
    row = sppo.metrics(ro, Counter(), sppo.Clock())
    assert ro.texts[0] == "\\boxed{7}=" and ro.reward.tolist() == [0, 0, 0]
    assert (row["reward"], row["cut_share"], row["response_tokens"], row["why/cut_off"]) == (0, 1, 4, 3)


def test_thinking_that_the_template_opened_must_be_closed_before_an_answer_counts():
    ro = sppo.Rollout([sppo.Problem("1+6=<think>\n", None, None, "7")] * 2)
    ro.texts, ro.cut = ["\\boxed{7}", "so</think>\\boxed{7}"], [False, False]
    sppo.verify(ro)
    assert ro.reward.tolist() == [0, 1]


ANSWERS = chain({EQUALS: {BOX: 1.0}, BOX: {SEVEN: 0.7, SEVEN + 1: 0.3}, SEVEN: {CLOSE: 1.0}, SEVEN + 1: {CLOSE: 1.0}})


def test_evaluation_measures_the_solve_rate_once_a_problem_and_remax_takes_the_greedy_answer(rig):
    policy, tok, cfg = rig(ANSWERS, eval_samples=4, eval_greedy=True)
    problems = [problem([EQUALS], gold) for gold in ["7"] * 150 + ["8"] * 150]
    row = sppo.evaluate(policy, tok, problems, cfg)
    assert row["eval/accuracy_greedy"] == 0.5 and row["eval/accuracy"] == pytest.approx(0.5, abs=0.06)
    assert row["eval/accuracy_greedy_ci95"] == pytest.approx(1.96 * 0.5 / math.sqrt(300))
    one = sppo.evaluate(policy, tok, problems[:150], dataclasses.replace(cfg, eval_greedy=False))
    assert one["eval/accuracy"] == pytest.approx(0.7, abs=0.08) and "eval/accuracy_greedy" not in one
    alone = sppo.evaluate(policy, tok, problems[:1], dataclasses.replace(cfg, eval_samples=300))  # avg@300
    assert alone["eval/accuracy"] == pytest.approx(0.7, abs=0.1) and alone["eval/accuracy_ci95"] == 0
    assert sppo.greedy_reward(sppo.Rollout(problems), policy, tok, cfg).tolist() == [1.0] * 150 + [0.0] * 150


# ----------------------------------------------------------------------------------------------------- critic


def value_of(critic, prompts: list[list[int]], cfg) -> torch.Tensor:
    ro = sppo.Rollout([problem(p) for p in prompts])
    sppo.value(ro, critic, cfg)
    return torch.cat(ro.value)


def test_v_is_one_half_for_every_prompt_before_anything_is_learned_and_then_where_it_is_told_to_start(plain):
    _, critic, _, _ = sppo.build(config(plain))
    assert value_of(critic, [[3], [4, 5, 6]], config(plain)).tolist() == [0.5, 0.5]
    for rate, V in ((0.3, 0.3), (0.0, 0.01), (1.0, 0.99)):
        critic.start_at(rate)
        got = value_of(critic, [[3], [4, 5, 6]], config(plain))
        torch.testing.assert_close(got, torch.tensor([V, V]))


@pytest.mark.parametrize("pad_is_end", [False, True])
def test_v_is_read_at_the_last_prompt_token_whatever_stands_beside_it(tmp_path, pad_is_end):
    cfg = config(rigged.write_model(tmp_path, pad_is_end=pad_is_end, dropout=0.5))
    _, critic, _, _ = sppo.build(cfg)
    nn.init.normal_(critic.head.weight)
    short, ends_in_end, long = [5, 9, 14, 3], [5, 9, 3, END], [4, 7, 2, 12] * 5
    together = value_of(critic, [long, short, ends_in_end], cfg)
    backbone = AutoModel.from_pretrained(cfg.model).eval()
    for prompt, v in zip((long, short, ends_in_end), together):
        torch.testing.assert_close(value_of(critic, [prompt], cfg)[0], v, atol=1e-4, rtol=0)
        last = backbone(torch.tensor([prompt])).last_hidden_state[0, -1]
        torch.testing.assert_close((last @ critic.head.weight[0]).detach().sigmoid(), v, atol=1e-4, rtol=0)
    assert together.std() > 0.01


def test_token_level_ppo_reads_v_before_each_response_token(plain):
    cfg = config(plain, algorithm="ppo")
    _, critic, _, _ = sppo.build(cfg)
    nn.init.normal_(critic.head.weight)
    ro = fixed_rollout([3, 7], [4, 2], [1, 0])
    sppo.value(ro, critic, cfg)
    for p, a, v in zip(ro.problems, ro.responses, ro.value, strict=True):
        hidden = critic.backbone(torch.cat([p.ids, a])[None]).last_hidden_state[0]
        want = (hidden @ critic.head.weight[0]).detach()[len(p.ids) - 1:-1]
        torch.testing.assert_close(v, want.sigmoid(), atol=1e-4, rtol=0)


def test_the_critic_has_no_language_head_and_as_many_layers_as_asked_for(tmp_path):
    folder = rigged.write_model(tmp_path, layers=3)
    for keep, want in ((0, 3), (1, 1), (2, 2), (3, 3)):
        policy, critic, _, _ = sppo.build(config(folder, critic_layers=keep))
        assert len(critic.backbone.layers) == want and critic.backbone.get_output_embeddings() is None
        assert not any("lm_head" in name for name in critic.state_dict())
        assert len(policy.lm.model.layers) == 3 and critic.backbone is not policy.lm.model
        for ours, theirs in zip(critic.backbone.layers, policy.lm.model.layers):
            torch.testing.assert_close(weights(ours), weights(theirs))
        value_of(critic, [[3, 4]], config(folder))
    with pytest.raises(sppo.UserError, match="critic-layers 4"):
        sppo.build(config(folder, critic_layers=4))


# ----------------------------------------------------------------------------------------------------- update

PROMPTS, RESPONSES, REWARDS = [2, 9, 4, 1, 6, 3, 12, 5], [1, 14, 3, 6, 2, 9, 5, 4], [1, 0, 0, 1, 1, 0, 1, 0]


def updated(folder: str, lr: float = 0.2, **settings):
    """Policy, critic and rollout after update() on eight fixed responses of uneven lengths, and their old weights."""
    cfg = config(folder, **settings)
    policy, critic, _, _ = sppo.build(cfg)
    before = [weights(m) for m in (policy, critic)]
    ro = fixed_rollout(PROMPTS, RESPONSES, REWARDS)
    sppo.value(ro, critic, cfg)
    sppo.advantage(ro, cfg)
    stats = sppo.update(policy, critic, sgd(policy, critic, lr), ro, cfg, 1)
    return policy, critic, ro, stats, before


def by_the_book(folder: str, lr: float = 0.2, epochs: int = 1, mini_batch_size: int = 8, clip_range: float = 0.2):
    """The same, written without any of sppo.py: one response at a time, all old log-probs first."""
    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    critic = Critic(AutoModel.from_pretrained(folder).eval())
    optimizers = [torch.optim.SGD(m.parameters(), lr=lr) for m in (lm, critic)]
    ro = fixed_rollout(PROMPTS, RESPONSES, REWARDS)

    def log_probs(i):
        ids = torch.cat([ro.problems[i].ids, ro.responses[i]])
        table = lm(ids[None]).logits[0, len(ro.problems[i].ids) - 1:-1].log_softmax(-1)
        return table.gather(-1, ro.responses[i][:, None])[:, 0]

    old = [log_probs(i).detach() for i in range(8)]
    for _ in range(epochs):
        for first in range(0, 8, mini_batch_size):
            rows = range(first, min(first + mini_batch_size, 8))
            v = torch.cat([critic(ro.problems[i].ids[None], (torch.tensor([0]), torch.tensor([-1]))) for i in rows])
            V, R = v.sigmoid(), ro.reward[list(rows)]
            critic_loss = -(R * V.log() + (1 - R) * (1 - V).log()).mean()
            objective = []
            for i in rows:
                ratio, A = (log_probs(i) - old[i]).exp(), ro.reward[i] - 0.5  # V was 0.5 when the batch was sampled
                objective.append(torch.minimum(ratio * A, ratio.clamp(1 - clip_range, 1 + clip_range) * A))
            for loss, optimizer in zip((-torch.cat(objective).mean(), critic_loss), optimizers):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return weights(lm), weights(critic)


# How the work is cut up: each response alone, about three at a time, all eight together.
@pytest.mark.parametrize("micro_batch_tokens", [1, 32, 10**6])
@pytest.mark.parametrize("how", [dict(), dict(epochs=2, mini_batch_size=3), dict(epochs=2, clip_range=0.01),
                                 dict(mini_batch_size=2)], ids=str)
def test_the_weights_after_an_update_do_not_depend_on_how_the_work_is_cut_up(plain, how, micro_batch_tokens):
    policy, critic, _, stats, before = updated(plain, micro_batch_tokens=micro_batch_tokens, **how)
    for model, want, old in zip((policy, critic), by_the_book(plain, **how), before):
        torch.testing.assert_close(weights(model), want, atol=1e-5, rtol=0)
        assert (want - old).abs().max() > 1e-3
    assert (stats["clipped"] > 0) == bool(how)  # a single step is taken at ratio 1; later ones reach the clip
    assert stats["tokens"] == sum(RESPONSES) * how.get("epochs", 1)


def test_micro_batches_hold_every_row_once_within_the_budget():
    lengths = torch.randint(1, 50, (100,)).tolist()
    for budget in (1, 60, 500):
        groups = sppo.micro_batches(lengths, budget, list(range(3, 100)))
        assert sorted(sum(groups, [])) == list(range(3, 100))
        assert all(len(g) == 1 or len(g) * max(lengths[i] for i in g) <= budget for g in groups)
    assert len(sppo.micro_batches([10] * 6, 30)) == 2


def test_the_loss_is_the_mean_over_all_tokens_of_the_mini_batch_by_hand(rig):
    """Responses of one and of five tokens in micro-batches of one: each token weighs 1/6.

    In a rigged model the gradient of log p(a) by the head's row of token a, in the column of the state, is 1 - p(a).
    """
    p = {ZERO: 0.5, ZERO + 1: 0.25, END: 0.25}
    policy, tok, cfg = rig(chain({t: p for t in (ZERO, ZERO + 1, EQUALS)}), micro_batch_tokens=1)
    ro = sppo.Rollout([problem([EQUALS]), problem([EQUALS])])
    ro.responses = [torch.tensor([END]), torch.tensor([ZERO, ZERO, ZERO, ZERO, END])]
    ro.advantage = [torch.tensor([0.75]), torch.full((5,), -0.5)]
    before = policy.lm.lm_head.weight.detach().clone()
    sppo.update(policy, None, sgd(policy), ro, cfg, 1)
    moved = policy.lm.lm_head.weight.detach() - before
    assert moved[END, EQUALS].item() == pytest.approx((0.75 * 0.75 + 0.5 * 0.25) / 6, abs=1e-5)  # -A p where not drawn
    assert moved[ZERO, EQUALS].item() == pytest.approx((-0.75 * 0.5 - 0.5 * 0.5) / 6, abs=1e-5)
    assert moved[ZERO, ZERO].item() == pytest.approx((-0.5 * (3 * 0.5 - 0.5)) / 6, abs=1e-5)  # three drawn, then END
    assert moved[END, ZERO].item() == pytest.approx((-0.5 * (0.75 - 3 * 0.25)) / 6, abs=1e-5)


@pytest.mark.parametrize("epochs", [1, 2])
def test_gradient_checkpointing_recomputes_and_gives_the_same_weights(awkward, epochs):
    how = dict(epochs=epochs, mini_batch_size=4, micro_batch_tokens=32)
    plainly = updated(awkward, **how)
    again = updated(awkward, gradient_checkpointing=True, **how)
    for a, b in zip(plainly[:2], again[:2]):
        torch.testing.assert_close(weights(a), weights(b), atol=1e-6, rtol=0)
    policy, calls = again[0], []
    policy.lm.model.layers[0].mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    with sppo.recomputing(policy, on=True):
        assert not any(m.training for m in policy.modules() if "Attention" in str(type(m)))
        sppo.policy_forward(policy, again[2], [0])[0].sum().backward()
    assert len(calls) == 2 and not any(m.training for m in policy.lm.modules())


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_gradient_checkpointing_leaves_a_layers_own_dropout_off(tmp_path):
    """OPT's layers ask for dropout themselves, by their training flag, which checkpointing needs to be on."""
    OPTForCausalLM(OPTConfig(vocab_size=16, hidden_size=8, num_hidden_layers=2, ffn_dim=8, num_attention_heads=2,
                             word_embed_proj_dim=8, max_position_embeddings=16, dropout=0.5)).save_pretrained(tmp_path)
    lm = sppo.load(AutoModelForCausalLM, str(tmp_path), config(tmp_path))
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.tensor([[4, 5, 6, 7]])
    with sppo.recomputing(lm, on=True):
        recomputed = lm(ids).logits
    torch.testing.assert_close(recomputed, lm(ids).logits)


def test_only_later_mini_batches_need_their_old_log_probs_beforehand(plain, monkeypatch):
    asked, real = [], sppo.remember_old_log_probs
    monkeypatch.setattr(sppo, "remember_old_log_probs", lambda *args: asked.append(args[3]) or real(*args))
    some = updated(plain, mini_batch_size=3)
    assert asked == [[3, 4, 5, 6, 7]]
    monkeypatch.setattr(sppo, "remember_old_log_probs", lambda *args: real(*args[:3], list(range(8))))
    torch.testing.assert_close(weights(some[0]), weights(updated(plain, mini_batch_size=3)[0]), atol=1e-6, rtol=0)
    monkeypatch.setattr(sppo, "remember_old_log_probs", lambda *args: pytest.fail("one mini-batch needs none"))
    updated(plain, epochs=2)


def test_groups_stay_together_in_a_mini_batch(plain, monkeypatch):
    seen = []
    monkeypatch.setattr(sppo, "policy_step", lambda policy, opt, ro, cfg, rows, stats: seen.append(rows))
    monkeypatch.setattr(sppo, "remember_old_log_probs", lambda *args: None)
    cfg = config(plain, algorithm="grpo", group_size=2, batch_size=5, mini_batch_size=2)
    sppo.update(None, None, {"policy": None}, sppo.Rollout([None] * 10), cfg, 1)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_critic_learns_alone_in_its_warm_up(plain):
    policy, critic, _, stats, before = updated(plain, critic_warmup=1)
    assert (weights(policy) == before[0]).all() and (weights(critic) != before[1]).any() and stats["policy_steps"] == 0
    ro, cfg = fixed_rollout(PROMPTS, RESPONSES, REWARDS), config(plain, algorithm="reinforce", critic_warmup=1)
    sppo.advantage(ro, cfg)
    assert sppo.update(policy, None, sgd(policy), ro, cfg, 1)["policy_steps"] > 0  # no critic: nothing to wait for


def test_a_gradient_above_the_limit_is_scaled_down_to_it(plain):
    policy, critic, _, stats, before = updated(plain, lr=1.0, max_grad_norm=0.01)
    for model, old, name in zip((policy, critic), before, ("policy", "critic")):
        assert (weights(model) - old).norm().item() == pytest.approx(0.01, rel=1e-2)
        assert stats[f"{name}_norm"] > 0.02  # what is logged is the norm before


@pytest.mark.parametrize("broken", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(plain, broken):
    cfg = config(plain)
    policy, critic, tok, _ = sppo.build(cfg)
    ro = fixed_rollout(PROMPTS, RESPONSES, REWARDS)
    sppo.value(ro, critic, cfg)
    sppo.advantage(ro, cfg)
    numbers = ro.advantage if broken == "policy" else ro.critic_target
    numbers[3] = torch.full_like(numbers[3], math.nan)
    models = {"policy": policy, "critic": critic}
    optimizers, before = sppo.make_optimizers(cfg, policy, critic), {k: weights(m) for k, m in models.items()}
    for optimizer in optimizers.values():
        optimizer.param_groups[0]["lr"] = 1e-3
    stats = sppo.update(policy, critic, optimizers, ro, cfg, 1)
    row = sppo.metrics(ro, stats, sppo.Clock())
    for name, model in models.items():
        assert row[f"{name}_skipped"] == (name == broken)
        assert (weights(model) == before[name]).all() == (name == broken)
        assert bool(optimizers[name].state) == (name != broken) and all(p.grad is None for p in model.parameters())


def test_weights_that_are_not_finite_are_never_saved(plain, tmp_path):
    cfg = config(plain)
    policy, critic, tok, _ = sppo.build(cfg)
    critic.head.bias.data.fill_(math.nan)
    with pytest.raises(sppo.RunFailed, match="critic's weights are not finite"):
        sppo.save(cfg, tmp_path, 1, policy, critic, sppo.make_optimizers(cfg, policy, critic), tok)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reward", [0, 1])
def test_rewards_that_all_agree_and_a_batch_of_one_are_harmless(plain, reward):
    cfg = config(plain)
    policy, critic, _, _ = sppo.build(cfg)
    ro = fixed_rollout([3], [4], [reward])
    sppo.value(ro, critic, cfg)
    sppo.advantage(ro, cfg)
    row = sppo.metrics(ro, sppo.update(policy, critic, sgd(policy, critic, 0.1), ro, cfg, 1), sppo.Clock())
    assert ro.advantage[0].tolist() == [reward - 0.5] * 4 and row["explained_variance"] is None
    assert all(v is None or math.isfinite(v) for v in row.values()) and weights(policy).isfinite().all()


# ----------------------------------------------------------------------------------------- metrics and settings


def test_metrics_by_hand():
    """Four responses; the value is measured in probabilities, token sums are divided by tokens, once."""
    ro = fixed_rollout([2] * 4, [1, 2, 3, 4], [1, 0, 1, 0])
    ro.value = list(torch.tensor([0.8, 0.4, 0.6, 0.2]).split(1))
    ro.cut = [False, True, False, False]
    cfg = config("")
    sppo.advantage(ro, cfg)
    stats = Counter(ratio=11.0, ratio_max=1.4, clipped=2, kl=0.5, entropy=7.0, tokens=10, policy_norm=3.0,
                    policy_steps=2, critic_norm=0.6, critic_steps=3, policy_skipped=1)
    row = sppo.metrics(ro, stats, sppo.Clock())
    want = dict(reward=0.5, value=0.5, advantage_std=math.sqrt((0.04 + 0.16 + 0.16 + 0.04) / 4),
                value_bce=-(2 * math.log(0.8) + 2 * math.log(0.6)) / 4, value_bce_constant=math.log(2),
                value_bce_floor=-(0.8 * math.log(0.8) + 0.2 * math.log(0.2) + 0.6 * math.log(0.6)
                                  + 0.4 * math.log(0.4)) / 2,
                explained_variance=1 - 0.1 / 0.25, ratio_mean=1.1, ratio_max=1.4, clip_share=0.2, kl=0.05, entropy=0.7,
                response_tokens=2.5, cut_share=0.25, policy_grad_norm=1.5, critic_grad_norm=0.2, policy_skipped=1,
                critic_skipped=0)
    want |= {"why/right": 2, "why/wrong": 2}
    for key, number in want.items():
        assert row[key] == pytest.approx(number, abs=1e-5), key
    assert {k for k in row if k not in want} == {"tokens_per_second"}


def test_the_sums_behind_ratio_kl_clip_share_and_entropy_by_hand(rig):
    policy, tok, cfg = rig(chain(DIGITS))
    ro = sppo.Rollout([problem([ZERO])] * 2, [torch.tensor([ZERO + 1, END]), torch.tensor([END])])
    ro.advantage = [torch.tensor([1.0, -1.0]), torch.tensor([1.0])]
    ratios = torch.tensor([1.5, 0.5, 1.1])
    ro.old_log_probs = list((torch.tensor([0.9, 0.1, 0.1]).log() - ratios.log()).split([2, 1]))
    stats = Counter()
    sppo.policy_step(policy, sgd(policy)["policy"], ro, cfg, [0, 1], stats)
    assert stats["tokens"] == 3 and stats["clipped"] == 2
    assert stats["ratio"] == pytest.approx(3.1, abs=1e-4) and stats["ratio_max"] == pytest.approx(1.5, abs=1e-4)
    assert stats["kl"] == pytest.approx((ratios - 1 - ratios.log()).sum().item(), abs=1e-4)
    assert stats["entropy"] == pytest.approx(-3 * (0.9 * math.log(0.9) + 0.1 * math.log(0.1)), abs=1e-4)


def test_every_setting_is_used_somewhere():
    """Read outside the class that declares them: a flag that nothing reads is a promise that nothing keeps."""
    tree = ast.parse((sppo.HERE / "sppo.py").read_text())
    body = [node for node in tree.body if not (isinstance(node, ast.ClassDef) and node.name == "Config")]
    read = {node.attr for part in body for node in ast.walk(part) if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) in ("cfg", "self.cfg")}
    assert {f.name for f in dataclasses.fields(sppo.Config)} - read == set()


def test_recipes_name_settings_that_exist_and_pass_the_checks():
    for name, recipe in sppo.RECIPES.items():
        cfg = sppo.Config(**{"model": name, **recipe})
        cfg.check()
        assert cfg == dataclasses.replace(sppo.parse(["--model", name, "--device", "cpu"]), device="",
                                          micro_batch_tokens=cfg.micro_batch_tokens)
    assert sppo.parse(["--model", "toy/model", "--lr", "0.5"]).lr == 0.5


@pytest.mark.parametrize("flags", [["--temperature", "0"], ["--temperature", "-1"], ["--clip-range", "0"],
                                   ["--dual-clip", "1.1"], ["--algorithm", "grpo", "--group-size", "1"],
                                   ["--eval-samples", "0", "--no-eval-greedy"], ["--lr", "-1"], ["--device", "abacus"]])
def test_settings_without_a_meaning_are_refused(flags):
    with pytest.raises(sppo.UserError, match=flags[-2] if flags[0] != "--eval-samples" else flags[0]):
        sppo.parse(flags)


def test_the_data_is_an_endless_row_of_shuffles_and_groups_stand_together():
    problems = [problem([i]) for i in range(10)]
    cfg = config("", batch_size=4)
    ids = [p.ids.item() for step in range(1, 11) for p in sppo.batch_of(problems, cfg, step)]
    epochs = [ids[i:i + 10] for i in range(0, 40, 10)]
    assert all(sorted(e) == list(range(10)) for e in epochs) and len({tuple(e) for e in epochs}) == 4
    grouped = sppo.batch_of(problems, dataclasses.replace(cfg, algorithm="rloo", group_size=3), 1)
    assert [p.ids.item() for p in grouped] == [i for i in ids[:4] for _ in range(3)]


# ------------------------------------------------------------------------------------- saved folders, whole runs


@pytest.mark.parametrize("tied, bf16", [(False, False), (True, False), (True, True)])
def test_a_saved_folder_loads_alone_and_keeps_what_the_source_recommends(tmp_path, tied, bf16):
    awkward = dict(nasty=True, template=True, ends=[END, NEWLINE])
    source = rigged.write_model(tmp_path / "source", tied=tied, bf16=bf16, **awkward)
    cfg = config(source)
    policy, critic, tok, _ = sppo.build(cfg)
    ids = torch.tensor([[3, 4, 12, 7]])
    policy.lm.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    sppo.save(cfg, tmp_path, 7, policy, critic, sppo.make_optimizers(cfg, policy, critic), tok)
    folder = tmp_path / "checkpoint-000007"
    lm, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(lm.eval()(ids).logits, policy.lm(ids).logits, atol=1e-6, rtol=0)
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == (not tied)
    settings = [json.loads((f / "generation_config.json").read_text()) for f in (sppo.Path(source), folder)]
    assert settings[0] == settings[1] and settings[1]["top_k"] == 2 and settings[1]["eos_token_id"] == [END, NEWLINE]
    saved = AutoTokenizer.from_pretrained(folder)
    assert saved.chat_template == rigged.TEMPLATE and saved("12+7=").input_ids == tok("12+7=").input_ids


def test_a_bf16_folder_learns_in_steps_too_small_for_bf16_and_is_saved_in_bf16(tmp_path):
    cfg = config(rigged.write_model(tmp_path / "source", bf16=True), weight_decay=0.0)
    policy, critic, tok, _ = sppo.build(cfg)
    optimizers, before = sppo.make_optimizers(cfg, policy, critic), weights(policy)
    optimizers["policy"].param_groups[0]["lr"] = 1e-6
    for step in range(1, 6):
        ro = fixed_rollout(PROMPTS, RESPONSES, REWARDS)
        sppo.value(ro, critic, cfg)
        sppo.advantage(ro, cfg)
        sppo.update(policy, critic, optimizers, ro, cfg, step)
    moved = (weights(policy) - before).abs()
    assert weights(policy).dtype == torch.float32 and (moved > 1e-6).float().mean() > 0.5 and moved.max() < 1e-5
    sppo.save(cfg, tmp_path, 5, policy, critic, optimizers, tok)
    folder = tmp_path / "checkpoint-000005"
    assert {w.dtype for w in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16  # what its config.json says
    master = torch.load(folder / "training.pt", weights_only=True)["models"]["policy"]
    torch.testing.assert_close(torch.cat([w.flatten() for w in master.values()]), weights(policy), atol=0, rtol=0)


# On the toy, but with nothing of the training recipe that its entry in RECIPES may come to hold.
TINY_RUN = ["--steps", "2", "--batch-size", "8", "--mini-batch-size", "4", "--max-response-tokens", "24", "--eval-size",
            "8", "--eval-every", "5", "--eval-samples", "2", "--lr", "1e-3", "--critic-lr", "1e-3", "--no-lr-decay",
            "--critic-warmup", "0", "--device", "cpu"]


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """One short run on the toy: its folder."""
    out = tmp_path_factory.mktemp("reference")
    assert sppo.main([*TINY_RUN, "--out", str(out)]) == 0
    return out


def final_weights(out, step=2) -> dict:
    return torch.load(out / f"checkpoint-{step:06d}" / "training.pt", weights_only=True)["models"]


def test_a_seeded_run_repeats_exactly_and_another_seed_differs(reference, tmp_path):
    assert sppo.main([*TINY_RUN, "--out", str(tmp_path / "same")]) == 0
    assert rigged.read_metrics(tmp_path / "same") == rigged.read_metrics(reference)
    for name, model in final_weights(reference).items():
        assert all((w == model[k]).all() for k, w in final_weights(tmp_path / "same")[name].items())
    assert sppo.main([*TINY_RUN, "--seed", "1", "--out", str(tmp_path / "other")]) == 0
    assert rigged.read_metrics(tmp_path / "other")[1:] != rigged.read_metrics(reference)[1:]


def test_v_starts_at_the_accuracy_measured_before_the_first_step(reference):
    before, first = rigged.read_metrics(reference)[:2]
    assert 0.01 < before["eval/accuracy"] < 0.99 and first["value"] == pytest.approx(before["eval/accuracy"], abs=1e-5)


def test_weight_decay_shrinks_both_models_by_the_rate_asked_for(plain):
    cfg = config(plain, weight_decay=0.25)
    policy, critic, _, _ = sppo.build(cfg)
    for name, optimizer in sppo.make_optimizers(cfg, policy, critic).items():
        model = policy if name == "policy" else critic
        before = weights(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        torch.testing.assert_close(weights(model), before * (1 - 0.1 * 0.25))


def test_evaluating_more_often_changes_no_number_of_the_training(reference, tmp_path):
    assert sppo.main([*TINY_RUN, "--eval-every", "1", "--out", str(tmp_path)]) == 0
    training = lambda out: [{k: v for k, v in row.items() if not k.startswith("eval")} for row in
                            rigged.read_metrics(out)]
    assert training(tmp_path) == training(reference)
    evaluated = ["eval/accuracy" in rigged.read_metrics(out)[1] for out in (tmp_path, reference)]
    assert evaluated == [True, False]


def test_a_learning_rate_of_zero_moves_nothing(tmp_path):
    assert sppo.main([*TINY_RUN, "--lr", "0", "--critic-lr", "0", "--out", str(tmp_path)]) == 0
    source = load_file(sppo.HERE / "toy/model/model.safetensors")
    for name, model in final_weights(tmp_path).items():
        for key, w in model.items():
            if not key.startswith("head"):
                key = key.replace("backbone.", "model.").removeprefix("lm.")
                assert (w == source["model.embed_tokens.weight" if key == "lm_head.weight" else key]).all(), (name, key)


@pytest.mark.parametrize("flags", ["ppo", "ppo --critic-loss mse --lam 0.95 --gamma 0.99", "grpo --group-size 4",
                                   "rloo --group-size 2", "remax", "reinforce --baseline 0.3"])
def test_every_algorithm_runs_and_trains(tmp_path, flags):
    run = [*TINY_RUN, "--algorithm", *flags.split(), "--dual-clip", "3", "--epochs", "2", "--out", str(tmp_path)]
    assert sppo.main(run) == 0
    row = rigged.read_metrics(tmp_path)[-1]
    assert row["step"] == 2 and all(v is None or math.isfinite(v) for v in row.values())
    assert row["policy_skipped"] == row["critic_skipped"] == 0 and row["policy_grad_norm"] > 0
    assert set(final_weights(tmp_path)) == ({"policy", "critic"} if "ppo" in flags else {"policy"})
    assert ("value_bce" in row) == ("ppo" in flags)


def test_a_step_samples_verifies_values_and_then_updates_the_critic_before_the_policy(tmp_path, monkeypatch):
    order = []
    for name in ("sample", "verify", "value", "advantage", "critic_step", "policy_step", "evaluate", "save"):
        def wrapped(*args, name=name, real=getattr(sppo, name)):
            order.append(name)
            return real(*args)
        monkeypatch.setattr(sppo, name, wrapped)
    assert sppo.main([*TINY_RUN, "--steps", "1", "--mini-batch-size", "8", "--no-eval-greedy", "--out",
                      str(tmp_path)]) == 0
    evaluation = ["evaluate", "sample", "verify"]
    assert order == [*evaluation, "sample", "verify", "value", "advantage", "critic_step", "policy_step", *evaluation,
                     "save"]


@pytest.mark.parametrize("decay", [False, True])
def test_learning_rates_rise_and_fall_as_asked(tmp_path, monkeypatch, decay):
    rates = []
    monkeypatch.setattr(sppo, "update", lambda policy, critic, optimizers, *rest: rates.append(
        [optimizers[k].param_groups[0]["lr"] for k in ("policy", "critic")]) or Counter())
    flags = ["--steps", "4", "--lr", "0.4", "--critic-lr", "0.8", "--lr-warmup", "2",
             *["--lr-decay"] * decay]
    assert sppo.main([*TINY_RUN, *flags, "--out", str(tmp_path)]) == 0
    scales = [0.5, 0.75, 0.5, 0.25] if decay else [0.5, 1, 1, 1]
    assert rates == [pytest.approx([0.4 * s, 0.8 * s]) for s in scales]
