"""Whole runs: stopping and going on, kills and signals, bad input, data files, tokenizers, two processes."""

import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import sppo

ROOT = Path(sppo.__file__).parent
TOY = ROOT / "toy/model"
TINY = ["--batch-size", "8", "--mini-batch-size", "4", "--eval-size", "4", "--eval-samples", "1", "--no-eval-greedy",
        "--max-response-tokens", "40", "--critic-warmup", "0", "--no-lr-decay", "--device", "cpu"]
LEARN = ["--lr", "1e-3", "--critic-lr", "1e-3"]


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """One thread (so that sums are taken in one order), one verifier for all tests, signal handlers put back."""
    monkeypatch.setattr(sppo.verifier, "stop", lambda: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # no curve
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def train(*flags) -> int:
    return sppo.main([*TINY, *map(str, flags)])


def rows_of(out: Path) -> list[dict]:
    """metrics.jsonl without what the clock says."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in r.items() if not k.startswith("seconds/") and k != "tokens_per_second"} for r in rows]


def state_of(out: Path, step: int) -> dict:
    return torch.load(out / f"checkpoint-{step:06d}/training.pt", weights_only=True)


def assert_same(a, b, atol=0.0, where="state"):
    """The same nested dicts, lists, tensors and numbers; to the last bit unless atol is given."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for k in a:
            assert_same(a[k], b[k], atol, f"{where}/{k}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, atol, f"{where}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b) if atol == 0 else torch.allclose(a, b, rtol=0, atol=atol), where
    else:
        close = isinstance(a, float) and math.isclose(a, b, rel_tol=10 * atol, abs_tol=10 * atol)
        assert a == b or close, where


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in zip(range(10, 40), range(20, 50))]


# ------------------------------------------------------------------------------------------------ stop and go on


def rewind(run: Path, out: Path, step: int) -> Path:
    """A copy of a run as it was after `step`, with a metrics file that had come further."""
    shutil.copytree(run, out)
    for folder in out.glob("checkpoint-*"):
        if int(folder.name[-6:]) > step:
            shutil.rmtree(folder)
    return out


@pytest.mark.parametrize("stops, flags", [
    ((1, 3, 5), ["--lr-decay", "--epochs", 2]),
    ((1, 2, 4), ["--critic-warmup", 2, "--lr-warmup", 4, "--algorithm", "ppo"]),
    ((3,), ["--algorithm", "grpo", "--group-size", 4, "--temperature", 0.7]),
], ids=["sppo", "ppo-warmups", "grpo"])
def test_resumed_run_equals_the_straight_one(tmp_path, stops, flags):
    straight = tmp_path / "straight"
    # 27 problems to train on and 8 a step: the first epoch ends inside step 4
    data = ["--dataset", write_rows(tmp_path / "few.jsonl", SUMS), "--eval-dataset", "", "--eval-size", 4]
    assert train(*data, *LEARN, *flags, "--steps", 6, "--eval-every", 2, "--save-every", 1, "--keep", 9,
                 "--out", straight) == 0
    assert any(r["policy_grad_norm"] > 0 for r in rows_of(straight)[3:])  # there was something to learn
    for stop in stops:
        resumed = rewind(straight, tmp_path / f"stop-{stop}", stop)
        assert sppo.main(["--resume", str(resumed)]) == 0
        assert rows_of(resumed) == rows_of(straight)
        assert_same(state_of(resumed, 6), state_of(straight, 6))


def test_end_of_an_epoch_is_a_place_to_stop(tmp_path):
    data = ["--dataset", write_rows(tmp_path / "few.jsonl", SUMS[:17]), "--eval-dataset", "", *LEARN]
    assert train(*data, "--steps", 3, "--out", tmp_path / "a") == 0  # one row held out: two steps an epoch
    assert train(*data, "--steps", 2, "--out", tmp_path / "b") == 0
    assert sppo.main(["--resume", str(tmp_path / "b"), "--steps", "3"]) == 0
    assert_same(state_of(tmp_path / "b", 3), state_of(tmp_path / "a", 3))
    a, b = ([r["reward"] for r in rows_of(tmp_path / name)[1:]] for name in "ab")
    assert a == b


def test_resume_when_all_is_done_says_so(tmp_path, capsys):
    assert train("--steps", 1, "--out", tmp_path / "a") == 0
    assert sppo.main(["--resume", str(tmp_path / "a")]) == 2
    assert "all 1 steps are done" in capsys.readouterr().err


def test_eval_only_of_a_run_shows_its_newest_checkpoint_and_changes_nothing(tmp_path, capsys):
    out = tmp_path / "run"
    assert train(*LEARN, "--steps", 2, "--eval-size", 40, "--out", out) == 0
    files = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    first, *_, last = rows_of(out)
    capsys.readouterr()
    assert sppo.main(["--resume", str(out), "--eval-only"]) == 0
    said = capsys.readouterr().out
    assert sppo.describe_evaluation(last) in said and last["eval/accuracy"] != first["eval/accuracy"]
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == files


def test_eval_only_can_be_followed_by_training(tmp_path):
    out = tmp_path / "run"
    assert train("--steps", 1, "--out", out, "--eval-only") == 0
    assert [r["step"] for r in rows_of(out)] == [0]
    assert sppo.main(["--resume", str(out)]) == 0
    assert [r["step"] for r in rows_of(out)] == [0, 1]


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.fixture
def run_of_3(tmp_path):
    out = tmp_path / "run"
    assert train(*LEARN, "--steps", 3, "--save-every", 1, "--keep", 2, "--out", out) == 0
    return out


def test_keeps_the_newest_and_passes_over_a_broken_one(run_of_3, capsys):
    assert [p.name for p in sppo.checkpoints(run_of_3)] == ["checkpoint-000002", "checkpoint-000003"]
    wanted, file = state_of(run_of_3, 3), run_of_3 / "checkpoint-000003/training.pt"
    os.truncate(file, file.stat().st_size // 2)
    (run_of_3 / ".checkpoint-000004.tmp").mkdir()
    (run_of_3 / ".checkpoint-000004.tmp/training.pt").write_text("half")
    capsys.readouterr()
    assert sppo.main(["--resume", str(run_of_3)]) == 0
    said = capsys.readouterr().out
    assert "checkpoint-000003 is incomplete (training.pt)" in said and "checkpoint-000002, step 2" in said
    assert_same(state_of(run_of_3, 3), wanted)
    assert [r["step"] for r in rows_of(run_of_3)] == [0, 1, 2, 3]


def test_keeps_as_many_as_asked_for(run_of_3):
    assert sppo.main(["--resume", str(run_of_3), "--steps", "6", "--keep", "4", "--save-every", "1"]) == 0
    assert [p.name for p in sppo.checkpoints(run_of_3)] == [f"checkpoint-{k:06d}" for k in (3, 4, 5, 6)]
    assert sppo.main(["--resume", str(run_of_3), "--steps", "8", "--keep", "6"]) == 0
    assert [p.name for p in sppo.checkpoints(run_of_3)] == [f"checkpoint-{k:06d}" for k in (3, 4, 5, 6, 7, 8)]


def test_a_folder_that_only_looks_like_a_checkpoint_is_left_alone(run_of_3):
    shutil.copytree(run_of_3 / "checkpoint-000002", run_of_3 / "checkpoint-best")
    assert sppo.newest_checkpoint(run_of_3).name == "checkpoint-000003"
    assert sppo.main(["--resume", str(run_of_3), "--steps", "4"]) == 0
    assert (run_of_3 / "checkpoint-best").is_dir() and len(sppo.checkpoints(run_of_3)) == 2


def test_a_broken_newer_checkpoint_does_not_push_out_the_whole_one_that_follows(run_of_3):
    (run_of_3 / "checkpoint-000003/whole.json").unlink()
    assert sppo.main(["--resume", str(run_of_3), "--steps", "2", "--keep", "1"]) == 2  # step 2 is there already
    os.rename(run_of_3 / "checkpoint-000003", run_of_3 / "checkpoint-000009")
    assert sppo.main(["--resume", str(run_of_3), "--steps", "3", "--keep", "1"]) == 0
    assert [p.name for p in sppo.checkpoints(run_of_3)] == ["checkpoint-000003"]


def test_no_whole_checkpoint_is_an_error_and_none_at_all_a_new_start(run_of_3, capsys):
    wanted = state_of(run_of_3, 3)
    for folder in sppo.checkpoints(run_of_3):
        (folder / "model.safetensors").unlink()
    assert sppo.main(["--resume", str(run_of_3)]) == 2
    assert "no whole checkpoint" in capsys.readouterr().err
    for folder in sppo.checkpoints(run_of_3):
        shutil.rmtree(folder)
    assert sppo.main(["--resume", str(run_of_3)]) == 0
    assert_same(state_of(run_of_3, 3), wanted)
    assert [r["step"] for r in rows_of(run_of_3)] == [0, 1, 2, 3]


def test_another_runs_folder_is_refused(run_of_3, capsys):
    before = rows_of(run_of_3)
    assert train("--steps", 1, "--out", run_of_3) == 2
    assert f"--resume {run_of_3}" in capsys.readouterr().err
    assert rows_of(run_of_3) == before


def test_start_that_fails_leaves_no_folder(tmp_path):
    assert train("--dataset", tmp_path / "none.jsonl", "--out", tmp_path / "run") == 2
    assert not (tmp_path / "run").exists()


def finite(value) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    return not isinstance(value, torch.Tensor) or bool(value.isfinite().all())


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_gradients_that_stay_nan_end_the_run(tmp_path, capsys, monkeypatch, model):
    step_of, steps = sppo.optimizer_step, []

    def poisoned(net, optimizer, cfg, stats, name):
        steps.append(name)
        if name == model and steps.count(name) > 4:  # from the third step on
            next(p for p in net.parameters() if p.grad is not None).grad[0] = math.nan
        step_of(net, optimizer, cfg, stats, name)

    monkeypatch.setattr(sppo, "optimizer_step", poisoned)
    assert train(*LEARN, "--steps", 9, "--save-every", 1, "--keep", 9, "--out", tmp_path / "run") == 1
    said = capsys.readouterr().err
    assert "\nsppo.py: the gradients of 3 steps in a row were not finite" in said
    last = [int(p.name[-6:]) for p in sppo.checkpoints(tmp_path / "run")][-1]
    assert last == 5
    assert finite(state_of(tmp_path / "run", last))
    moved = [state_of(tmp_path / "run", step)["models"][model] for step in (2, last)]
    assert_same(*moved)


# ------------------------------------------------------------------------------------------------ kills and signals

START = multiprocessing.get_context("forkserver")  # children start with everything imported, in milliseconds
START.set_forkserver_preload(["sppo", "torch._dynamo", "transformers.generation",
                              "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"])


def child(argv: list[str], log: Path) -> None:
    """The body of a training process: sppo.py as a program, what it prints going to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    sys.modules["matplotlib"] = None
    sppo.verifier.start = lambda: None  # the toy's answers need no algebra
    sys.exit(sppo.main(argv))


def spawn(log: Path, *argv):
    process = START.Process(target=child, args=([*map(str, argv)], log))
    process.start()
    return process


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.01)


def finish(process, seconds=60) -> int:
    process.join(seconds)
    assert process.exitcode is not None, "still running"
    return process.exitcode


@pytest.mark.soak
def test_killed_and_resumed_ends_where_the_unkilled_ends(tmp_path, kills=20):
    steps, rng = 8 * kills, random.Random(kills)  # more than are done in the meantime
    flags = [*TINY, *LEARN, "--steps", steps, "--save-every", 1, "--eval-every", 5]
    assert sppo.main([*map(str, flags), "--out", str(tmp_path / "whole")]) == 0
    out, log, killed = tmp_path / "killed", tmp_path / "log", 0
    process = spawn(log, *flags, "--out", out)
    while killed < kills:
        before = sppo.checkpoints(out)[-1:]
        wait_for(lambda: sppo.checkpoints(out)[-1:] > before, process)
        time.sleep(rng.random() * 0.4)  # at any moment of the next steps, saving included
        process.kill()
        killed += finish(process) == -signal.SIGKILL
        process = spawn(log, "--resume", out)
    assert finish(process, 120) == 0, log.read_text()[-2000:]
    assert_same(state_of(out, steps), state_of(tmp_path / "whole", steps))
    assert rows_of(out) == rows_of(tmp_path / "whole")


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_finishes_the_step_saves_once_and_says_how_to_go_on(tmp_path, signum, code):
    out, log = tmp_path / "run", tmp_path / "log"
    process = spawn(log, *TINY, *LEARN, "--steps", 500, "--out", out)
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(rows_of(out)) >= 3, process)
    os.kill(process.pid, signum)
    assert finish(process) == code
    (checkpoint,), last = sppo.checkpoints(out), rows_of(out)[-1]["step"]
    assert checkpoint.name == f"checkpoint-{last:06d}" and last >= 2
    assert f"stopped after step {last} and saved; go on with: python sppo.py --resume {out}" in log.read_text()
    assert train("--resume", out, "--steps", last + 1) == 0
    assert [r["step"] for r in rows_of(out)] == list(range(last + 2))


def test_second_signal_ends_at_once(tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    process = spawn(log, *TINY, "--steps", 9, "--max-response-tokens", 400, "--eval-every", 100, "--batch-size", 2000,
                    "--out", out)
    wait_for(lambda: (out / "metrics.jsonl").exists(), process)
    os.kill(process.pid, signal.SIGINT)
    wait_for(lambda: "stopping after this step" in log.read_text(), process)
    os.kill(process.pid, signal.SIGINT)
    assert finish(process, 5) == -signal.SIGINT
    assert sppo.checkpoints(out) == []


def test_interrupt_before_the_first_step_is_quiet(monkeypatch, capsys):
    def interrupted(cfg):
        raise KeyboardInterrupt
    monkeypatch.setattr(sppo, "build", interrupted)
    assert train() == 130
    assert "nothing to save" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ bad input


def refused(capsys, *flags) -> str:
    """The one line that bad input ends in."""
    try:
        code = sppo.main([*map(str, flags)])
    except SystemExit as error:  # argparse
        code = error.code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sppo.py: ")]
    assert code == 2 and len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("flags, word", [
    ("--batch-size 0", "--batch-size"), ("--temperature 0", "--temperature"), ("--temperature nan", "--temperature"),
    ("--lr -1", "--lr"), ("--algorithm dpo", "dpo"), ("--steps many", "many"),
    ("--algorithm grpo --group-size 1", "group"),
    ("--eval-samples 0 --no-eval-greedy", "--eval-greedy"), ("--dual-clip 1.1", "--dual-clip"), ("--device tpu", "tpu"),
    ("--prompt-column nosuch", "nosuch"), ("--answer-column a.b", "a.b"), ("--dataset none.jsonl", "none.jsonl"),
    ("--model nothing", "nothing"), ("--model ./no/such", "./no/such"), ("--model tests", "config.json"),
    ("--critic-layers 9", "has 3 layers"), ("--resume no/run", "no run there"), ("--resume toy/model", "not a run"),
    ("--dataset sppo.py", "not a .jsonl"), ("--gamma 1.5", "--gamma"), ("--lam nan", "--lam"),
    ("--max-response-tokens 512", "positions"),
])
def test_bad_flags(capsys, monkeypatch, flags, word):
    monkeypatch.chdir(ROOT)
    assert word in refused(capsys, "--device", "cpu", *flags.split())


def test_resume_stays_in_its_folder_and_with_its_models(capsys, run_of_3, tmp_path):
    assert "--out" in refused(capsys, "--resume", run_of_3, "--out", tmp_path / "other")
    assert "does not fit this critic" in refused(capsys, "--resume", run_of_3, "--critic-layers", 1, "--steps", 9)


def test_out_of_memory_names_the_flags(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sppo, "generate", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA")))
    assert "--sample-batch-tokens" in refused(capsys, *TINY, "--out", tmp_path / "run")


def test_a_recipes_warm_up_leaves_the_policy_some_steps(tmp_path):
    assert sppo.parse(["--steps", "20"]).critic_warmup == 5
    asked_for = sppo.parse(["--steps", "20", "--critic-warmup", "20"])
    assert asked_for.critic_warmup == 20
    sppo.begin_folder(asked_for, tmp_path)
    assert sppo.parse(["--resume", str(tmp_path)]).critic_warmup == 20


def test_of_two_runs_that_begin_in_one_folder_the_second_is_refused(tmp_path):
    cfg = sppo.parse(["--out", str(tmp_path / "run")])
    first, second = sppo.choose_folder(cfg), sppo.choose_folder(cfg)  # both find it empty, then load for a while
    sppo.begin_folder(cfg, first)
    with pytest.raises(sppo.UserError, match="File exists"):
        sppo.begin_folder(cfg, second)


@pytest.mark.parametrize("name, content", [
    ("empty.jsonl", ""), ("empty.json", "[]"), ("empty.csv", ""),
    ("broken.jsonl", '{"prompt": "1+1=", "answer": "2"}\n{"pro'),
    ("broken.json", "[{"), ("broken.parquet", "PAR1 no"), ("text.jsonl", '"text"\n'), ("number.json", "7"),
    ("latin.csv", b"prompt,answer\n\xff\xfe,2\n"), ("blank.jsonl", "\n\n"),
    ("unusable.jsonl", '{"prompt": "", "answer": "2"}\n'),
])
def test_bad_files(capsys, tmp_path, name, content):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert name in refused(capsys, "--device", "cpu", "--dataset", tmp_path / name)


def test_pickled_weights_are_refused(capsys, tmp_path):
    shutil.copytree(TOY, tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    torch.save({}, tmp_path / "model/pytorch_model.bin")
    assert "cannot be loaded" in refused(capsys, "--device", "cpu", "--model", tmp_path / "model")


@pytest.mark.parametrize("flags", [["--model", "Qwen2.5-0.5B"], pytest.param(["--dataset", "gsm8k"],
                                                                             marks=pytest.mark.soak)])
def test_no_network_ends_soon(tmp_path, flags):
    begin = time.monotonic()
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, ROOT / "sppo.py", *flags], cwd=tmp_path, env=env, capture_output=True,
                          text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and flags[1] in done.stderr
    assert time.monotonic() - begin < 20  # under 10 s on an idle machine; with the hub's own retries it is over 30
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


# ------------------------------------------------------------------------------------------------ data


@pytest.fixture(scope="module")
def toy_tok():
    return AutoTokenizer.from_pretrained(TOY)


@pytest.fixture
def loaded(toy_tok, tmp_path):
    """Problems of a file as (text, gold) pairs, the toy's tokenizer and no instruction assumed."""
    def load(content, name="rows.jsonl", *flags):
        path = tmp_path / name
        if isinstance(content, list):
            write_rows(path, content)
        elif content is not None:
            path.write_bytes(content.encode())
        cfg = sppo.parse(["--device", "cpu", *flags])
        problems = sppo.load_problems(str(path), "train", cfg, toy_tok, toy_tok)
        return [(p.text.removesuffix("\n"), p.gold) for p in problems]
    return load


def test_unusable_rows_are_dropped_counted_and_shown(loaded, capsys):
    assert loaded([
        {"prompt": "1+1=", "answer": "2"}, {"prompt": "", "answer": "2"}, {"prompt": "  ", "answer": "2"},
        {"prompt": None, "answer": "2"}, {"answer": "2"}, {"prompt": "1+2="}, {"prompt": "1+2=", "answer": None},
        {"prompt": "1+2=", "answer": ""}, {"prompt": "1+2=", "answer": "\\frac{1"}, {"prompt": {"a": 1}, "answer": "2"},
        {"prompt": [], "answer": "2"}, {"prompt": "1" * 64 + "=", "answer": "2"}, {"prompt": "9" * 63, "answer": "2"},
        {"prompt": float("nan"), "answer": "2"}, {"prompt": "1+\ud800", "answer": "2"}, {"prompt": "1+3=", "answer": "2\ud800"},
        {"question": " ", "problem": float("nan"), "prompt": "2+2=", "answer": float("inf"), "Answer": 4},
    ]) == [("1+1=", "2"), ("9" * 63, "2"), ("2+2=", "4")]  # 63 and a newline: just fits
    said = capsys.readouterr().out
    assert "17 rows, 3 kept, 14 dropped" in said and "6 empty prompt, e.g. row 2" in said
    assert "2 broken unicode (half of a character), e.g. row 15" in said
    assert "3 empty answer, e.g. row 6" in said and "1 unreadable answer, e.g. row 9" in said
    assert "1 longer than 64 prompt tokens, e.g. row 12" in said


def test_mixed_types_in_a_column(loaded):
    assert loaded([{"prompt": "1+1=", "answer": 2}, {"prompt": 7, "answer": 2.5}, {"prompt": "1+2=", "answer": "3"},
                   {"prompt": "3", "answer": 3.0}, {"prompt": "4", "answer": ["4"]}, {"prompt": "5", "answer": [4, 5]},
                   "no row", 5]) == [("1+1=", "2"), ("7", "2.5"), ("1+2=", "3"), ("3", "3"), ("4", "4")]


@pytest.mark.parametrize("name, content", [
    ("a.csv", 'prompt,answer\n"1+1=",2\n1+2=,3\n'),
    ("bom.csv", '\ufeffprompt,answer\n1+1=,2\n1+2=,3\n1+3=\n'),
    ("a.json", '[{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": "3"}]'),
    ("nested.json", '{"version": 1, "data": [{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": "3"}]}'),
    ("bom.jsonl", '\ufeff{"prompt": "1+1=", "answer": 2}\r\n\n{"prompt": "1+2=", "answer": 3}'),
    ("math.jsonl", '{"problem": "1+1=", "answer": "$2$", "solution": "-"}\n{"problem": "1+2=", "answer": "3"}\n'),
    ("gsm8k.jsonl", '{"question": "1+1=", "answer": "<<1+1=2>>\\n#### 2"}\n{"question": "1+2=", "answer": "#### 3"}\n'),
    ("CAPS.JSONL", '{"prompt": "1+1=", "answer": 2}\n{"prompt": "1+2=", "answer": 3}'),
])
def test_file_formats(loaded, name, content):
    assert loaded(content, name) == [("1+1=", "2"), ("1+2=", "3")]


def test_unusual_line_separators_inside_a_text_do_not_split_the_row(loaded):
    text = "1\u2028+\u0085\x0b1="
    assert loaded(json.dumps({"prompt": text, "answer": 2}, ensure_ascii=False) + "\n") == [(text, "2")]


def test_svamp(loaded):
    assert loaded([{"ID": "a", "Body": "1+1=", "Question": " 1+2= ", "Equation": "1 + 2", "Answer": 3.0}]) == [
        ("1+1= 1+2=", "3")]


def test_parquet_with_chats_and_nested_answers(loaded, tmp_path):
    import pyarrow
    import pyarrow.parquet
    chat = [dict(role=r, content=c) for r, c in (("user", "1+1="), ("assistant", "2"), ("user", "1+2="))]
    rows = [{"prompt": chat, "reward_model": {"ground_truth": "3", "style": "rule"}},
            {"prompt": chat[:2], "reward_model": {"ground_truth": "3", "style": "rule"}}]  # does not end with the user
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert loaded(None, "a.parquet") == [("1+1=\n2\n1+2=", "3")]


def test_named_columns_reach_into_nested_ones(loaded):
    rows = [{"prompt": "no", "a": {"b": {"c": "1+1="}}, "x.y": 2}, {"prompt": "no", "a": None, "x.y": 2}]
    assert loaded(rows, "rows.jsonl", "--prompt-column", "a.b.c", "--answer-column", "x.y") == [("1+1=", "2")]


def test_training_and_evaluation_share_no_prompt(toy_tok, tmp_path, capsys):
    doubled = write_rows(tmp_path / "doubled.jsonl", SUMS * 2)
    some = write_rows(tmp_path / "some.jsonl", SUMS[:5])
    for evaluation, held, left in (("", 3, 27), (str(some), 5, 50)):
        cfg = sppo.parse(["--device", "cpu", "--dataset", str(doubled), "--eval-dataset", evaluation])
        problems, eval_problems = sppo.split_problems(cfg, toy_tok, toy_tok)
        assert not {p.text for p in problems} & {p.text for p in eval_problems}
        assert (len(eval_problems), len(problems)) == (held, left)
        assert f"evaluation: {held} problems" in capsys.readouterr().out


def test_fewer_rows_than_a_batch_trains_on_what_is_there(tmp_path, capsys):
    data = write_rows(tmp_path / "few.jsonl", SUMS[:4])
    assert train("--dataset", data, "--eval-dataset", "", "--steps", 2, "--out", tmp_path / "run") == 0
    assert "note: 3 problems for batches of 8" in capsys.readouterr().out
    assert sum(v for k, v in rows_of(tmp_path / "run")[1].items() if k.startswith("why/")) == 3


def test_nothing_left_to_train_on_is_an_error(tmp_path, capsys):
    data = write_rows(tmp_path / "few.jsonl", SUMS[:4])
    both = ["--device", "cpu", "--dataset", data, "--eval-dataset", data]
    assert "no problem is left to train on" in refused(capsys, *both)
    one = write_rows(tmp_path / "one.jsonl", SUMS[:1])
    assert "no problem is left" in refused(capsys, "--device", "cpu", "--dataset", one, "--eval-dataset", "")


# ------------------------------------------------------------------------------------------------ tokenizers

SPECIAL = ["<pad>", "<end>", "<s>", "<turn>"]
CHARACTERS = [*map(chr, range(32, 127)), "\n"]
CHAT = ("{{ begin }}{% for m in messages %}{{ m.role }}: {{ m.content }}<turn>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")


def make_tokenizer(template=None, bos=False, pad="<pad>"):
    """One token a character. With bos, encoding begins with <s>."""
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(SPECIAL + CHARACTERS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIAL)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tok = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False,
                                  **(dict(pad_token=pad) if pad else {}), **(dict(bos_token="<s>") if bos else {}))
    tok.chat_template = template
    return tok


def make_folder(folder: Path, tok=None, vocab=len(SPECIAL + CHARACTERS), eos=1) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=2, bos_token_id=None, eos_token_id=eos, pad_token_id=None,
                                 tie_word_embeddings=True)).save_pretrained(folder)
    if tok is not None:
        tok.save_pretrained(folder)
    return folder


def built(folder: Path, *flags):
    return sppo.build(sppo.parse(["--device", "cpu", "--model", str(folder), *map(str, flags)]))


def test_no_tokenizer_is_an_error(capsys, tmp_path):
    assert "no usable tokenizer" in refused(capsys, "--device", "cpu", "--model", make_folder(tmp_path / "m"))


@pytest.mark.parametrize("pad, pad_id", [(None, 1), ("<end>", 1), ("<pad>", 0)])
def test_no_pad_token_or_pad_equal_to_end(tmp_path, pad, pad_id):
    folder = make_folder(tmp_path / "m", make_tokenizer(pad=pad))
    tok = built(folder)[2]
    assert tok.pad_id == pad_id and tok.end_ids == {1}
    assert train("--model", folder, "--dataset", write_rows(tmp_path / "d.jsonl", SUMS), "--steps", 1,
                 "--out", tmp_path / "run") == 0


def test_model_may_be_wider_than_its_tokenizer_but_not_narrower(capsys, tmp_path):
    assert built(make_folder(tmp_path / "wide", make_tokenizer(), vocab=128))
    narrow = make_folder(tmp_path / "narrow", make_tokenizer(), vocab=60)
    with pytest.raises(sppo.UserError, match="no embedding"):
        built(narrow)
    with pytest.raises(sppo.UserError, match="no embedding"):
        built(tmp_path / "wide", "--critic-model", make_folder(tmp_path / "other", make_tokenizer(CHAT), vocab=60))


@pytest.mark.parametrize("template, bos", [(None, True), (CHAT, True), (CHAT.replace("begin", "bos_token"), True),
                                           (CHAT, False), (None, False)])
def test_prompt_has_one_bos_where_the_tokenizer_uses_one(tmp_path, template, bos):
    make_tokenizer(template, bos).save_pretrained(tmp_path)
    tok = sppo.load_tokenizer(str(make_folder(tmp_path)), sppo.parse([]))
    (ids,) = sppo.encode([sppo.render("1+1=", tok, "")], tok)
    assert ids.tolist().count(2) == int(bos) and (ids[0] == 2) == bos
    assert sppo.encode([], tok) == []


def test_render_plain_and_with_an_instruction():
    tok = make_tokenizer()
    assert sppo.render("1+1=", tok, "Box it: \\boxed{}.") == "1+1=\nBox it: \\boxed{}.\n"
    assert sppo.render("\\boxed{1+1}", tok, "Box it.") == "\\boxed{1+1}\n"
    chat = [dict(role=r, content=c) for r, c in (("user", "1+1="), ("assistant", "2"), ("user", "1+2="))]
    assert sppo.render(chat, tok, "Box it.") == "1+1=\n2\n1+2=\nBox it.\n"
    assert chat[-1]["content"] == "1+2="  # the data stay as they were


def test_template_that_refuses_a_system_turn():
    tok = make_tokenizer("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]
    assert sppo.render(chat, tok, "") == "user: Be brief.\n1+1=<turn>\nassistant: "
    tok.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ValueError, match="refuses"):
        sppo.render("1+1=", tok, "")


def test_end_of_turn_is_found_in_the_template(tmp_path):
    tok = built(make_folder(tmp_path / "m", make_tokenizer(CHAT), eos=[1, 5]))[2]
    assert tok.end_ids == {1, 3, 5}  # the tokenizer's, <turn>, the checkpoint's
    assert built(make_folder(tmp_path / "n", make_tokenizer(CHAT.replace("<turn>", ""))))[2].end_ids == {1}


def test_thinking_opened_by_the_template_must_be_closed():
    tok = make_tokenizer(CHAT.replace("assistant: {% endif", "assistant: <think>\n{% endif"))
    texts = ["\\boxed{2}", "so</think> \\boxed{2}", "so</think> \\boxed{3}"]
    for prompt, wanted in ((sppo.render("1+1=", tok, ""), [0, 1, 0]), ("1+1=", [1, 1, 0])):
        ro = sppo.Rollout([sppo.Problem(prompt, None, None, "2")] * 3, texts=texts, cut=[False] * 3)
        sppo.verify(ro)
        assert ro.reward.tolist() == wanted


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizer"])
def test_tokenizer_that_the_library_rebuilds_wrongly(tmp_path, name):
    folder = make_folder(tmp_path / "m", make_tokenizer(CHAT))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": name}))
    if name.startswith("Qwen2"):
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
    tok = sppo.load_tokenizer(str(folder), sppo.parse([]))
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("12+7=19", "So  it is\n\\boxed{a b}.<turn>"):
        assert sppo.plain_ids(tok, text) == own.encode(text, add_special_tokens=False).ids
        assert tok.decode(sppo.plain_ids(tok, text)) == text
    assert (tok.eos_token_id, tok.pad_token_id, bool(tok.chat_template)) == (1, 0, True)


def test_critic_with_a_tokenizer_of_its_own(tmp_path):
    """The critic reads the prompt through its own template; what it says does not depend on the policy's tokenizer."""
    critic = make_folder(tmp_path / "critic", make_tokenizer(CHAT))
    values = []
    for model in (TOY, critic):
        cfg = sppo.parse(["--device", "cpu", "--model", str(model), "--critic-model", str(critic), "--instruction", ""])
        _, critic_net, tok, critic_tok = sppo.build(cfg)
        assert (tok is critic_tok) == (model is critic)
        torch.nn.init.normal_(critic_net.head.weight, generator=torch.Generator().manual_seed(0))
        file = write_rows(tmp_path / "d.jsonl", SUMS[:5])
        ro = sppo.Rollout(sppo.load_problems(str(file), "train", cfg, tok, critic_tok))
        sppo.value(ro, critic_net, cfg)
        values.append(torch.cat(ro.value))
    assert torch.equal(*values) and values[0].std() > 0
    assert train("--critic-model", critic, "--steps", 2, "--out", tmp_path / "run") == 0
    assert sppo.main(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0


# ------------------------------------------------------------------------------------------------ two processes

# Batches of 5 in mini-batches of 3, so processes get 3 and 2 rows, and one of them none of the last mini-batch's two.
UNEVEN = ["--batch-size", "5", "--mini-batch-size", "3", "--micro-batch-tokens", "60", "--lr", "1e-4", "--critic-lr",
          "1e-4", "--eval-size", "7", "--eval-samples", "1", "--eval-every", "2", "--critic-warmup", "0",
          "--no-lr-decay", "--device", "cpu"]


def torchrun(script: Path, *flags, **how) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                             str(script), *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True, **how)


def outcome(process: subprocess.Popen, seconds=120) -> tuple[int, str, str]:
    try:
        said, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, said, errors


@pytest.fixture
def fixed(monkeypatch):
    from fixed_responses import fixed_sample
    monkeypatch.setattr(sppo, "sample", fixed_sample)
    return ROOT / "tests/fixed_responses.py"


def test_two_processes_do_what_one_does(tmp_path, fixed):
    two, one = tmp_path / "two", tmp_path / "one"
    process = torchrun(fixed, *UNEVEN, "--steps", 2, "--out", two)
    assert sppo.main([*UNEVEN, "--steps", "2", "--out", str(one)]) == 0
    code, said, errors = outcome(process)
    assert code == 0, errors
    assert said.count("a step: 5 prompts") == said.count("policy: ") == 1  # one of them speaks
    assert_same(rows_of(two), rows_of(one), 1e-5)
    assert_same(state_of(two, 2), state_of(one, 2), 1e-5)
    assert all(r["policy_grad_norm"] > 0 and r["critic_grad_norm"] > 0 for r in rows_of(one)[1:])
    for out in (two, one):  # and its checkpoint goes on in one process
        assert sppo.main(["--resume", str(out), "--steps", "3"]) == 0
    assert_same(state_of(two, 3), state_of(one, 3), 1e-5)


@pytest.mark.soak
def test_two_processes_go_on_from_one(tmp_path, fixed):
    one, two = tmp_path / "one", tmp_path / "two"
    assert sppo.main([*UNEVEN, "--steps", "2", "--out", str(one)]) == 0
    shutil.copytree(one, two)
    process = torchrun(fixed, "--resume", two, "--steps", 4)
    assert sppo.main(["--resume", str(one), "--steps", "4"]) == 0
    code, _, errors = outcome(process)
    assert code == 0, errors
    assert_same(state_of(two, 4), state_of(one, 4), 1e-5)
    assert_same(rows_of(two), rows_of(one), 1e-5)


@pytest.mark.parametrize("algorithm, prompts, mini", [
    ("sppo", 3, 2),  # the second mini-batch has a row for the first process alone
    *[pytest.param(*case, marks=pytest.mark.soak) for case in (
        ("sppo", 2, 1), ("sppo", 5, 5), ("ppo", 5, 1), ("grpo", 5, 1), ("remax", 5, 1))]])
def test_two_processes_sample_for_themselves(tmp_path, algorithm, prompts, mini):
    """Uneven shares, empty ones included, must not leave one process waiting for the other."""
    out = tmp_path / "run"
    code, _, errors = outcome(torchrun(ROOT / "sppo.py", *TINY, "--algorithm", algorithm, "--group-size", 3,
                                       "--batch-size", prompts, "--mini-batch-size", mini, "--steps", 2, "--out", out))
    assert code == 0, errors
    counts = [sum(v for k, v in r.items() if k.startswith("why/")) for r in rows_of(out)[1:]]
    assert counts == [prompts * (3 if algorithm == "grpo" else 1)] * 2


@pytest.mark.soak
@pytest.mark.parametrize("where", ["build", "verify", "save"])
def test_exception_in_one_process_ends_both(tmp_path, where):
    script = tmp_path / "broken.py"
    script.write_text(f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport sppo\ngood = sppo.{where}\n"
                      "def bad(*a, **k):\n    if os.environ['RANK'] == '1':\n"
                      "        raise LookupError('a fault of one')\n"
                      f"    return good(*a, **k)\nsppo.{where} = bad\nsys.exit(sppo.main())\n")
    begin = time.monotonic()
    code, _, errors = outcome(torchrun(script, *TINY, "--steps", 2, "--out", tmp_path / "run"), 90)
    assert code != 0 and "LookupError: a fault of one" in errors and "Traceback" in errors
    assert time.monotonic() - begin < 60


@pytest.mark.soak
def test_two_processes_evaluate_without_a_row_to_train_on(tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": 2}\n')
    process = torchrun(ROOT / "sppo.py", *TINY, "--dataset", file, "--eval-dataset", file, "--eval-only", "--out",
                       tmp_path / "run")
    code, _, errors = outcome(process, 90)
    assert code == 0, errors


@pytest.mark.soak
def test_interrupted_torchrun_saves(tmp_path):
    """A terminal's Ctrl-C reaches every process, and torchrun passes it on once more."""
    out = tmp_path / "run"
    process = torchrun(ROOT / "sppo.py", *TINY, "--steps", 500, "--out", out)
    end = time.monotonic() + 90
    while not ((out / "metrics.jsonl").exists() and len(rows_of(out)) >= 3):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    code, said, errors = outcome(process, 60)
    (checkpoint,), last = sppo.checkpoints(out), rows_of(out)[-1]["step"]
    assert code != 0 and checkpoint.name == f"checkpoint-{last:06d}", errors
    assert "and saved; go on with" in said
