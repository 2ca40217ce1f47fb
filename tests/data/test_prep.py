"""`quadriga prep`: rows in the format the trainer reads, with results that a scorer can trust."""

from __future__ import annotations

import json
import sys

import pyarrow.parquet as pq
import pytest

from quadriga.commands.prep import main
from quadriga.data import RLDataset
from quadriga.data.prep.arithmetic import generate_arithmetic
from quadriga.data.prep.converters import last_boxed
from quadriga.errors import DataError

GSM8K = {"question": "How many?", "answer": "2 and 2 make <<2+2=4>>4 thousand\n#### 4,000"}


def prepared(folder, split="train"):
    return pq.read_table(folder / f"{split}.parquet").to_pylist()


def json_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_gsm8k_rows_are_complete(tmp_path, capsys):
    for split in ("train", "test"):
        json_lines(tmp_path / "in" / f"{split}.jsonl", [GSM8K])
    assert main(["gsm8k", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    assert prepared(tmp_path / "out", "test") == [
        {
            "data_source": "openai/gsm8k",
            "prompt": [
                {
                    "role": "user",
                    "content": 'How many? Let\'s think step by step and output the final answer after "####".',
                }
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4000"},
            "extra_info": {"split": "test", "index": 0, "question": GSM8K["question"], "answer": GSM8K["answer"]},
        }
    ]
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/out/train.parquet: 1 rows",
        f"{tmp_path}/out/test.parquet: 1 rows",
    ]


def test_math_reads_the_boxed_result_from_folders_of_json_files(tmp_path):
    for split in ("train", "test"):
        folder = tmp_path / "MATH" / split / "algebra"
        folder.mkdir(parents=True)
        example = {"problem": "Halve 1.", "solution": r"So \boxed{2}, no: $\boxed{\frac{1}{2}}$.", "level": "Level 1"}
        (folder / "1.json").write_text(json.dumps(example, indent=2))
    main(["math", "--input", str(tmp_path / "MATH"), "--output", str(tmp_path)])
    (row,) = prepared(tmp_path)
    assert row["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert row["prompt"][0]["content"].endswith(r"within \boxed{}.")


def test_math_reads_questions_with_plain_answers_and_holds_out_a_tenth(tmp_path):
    json_lines(tmp_path / "a.jsonl", [{"question": f"q{n}", "answer": str(n)} for n in range(30)])
    main(["math", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")])
    train, test = prepared(tmp_path / "out"), prepared(tmp_path / "out", "test")
    answers = [row["reward_model"]["ground_truth"] for row in train + test]
    assert (len(train), len(test)) == (27, 3)
    assert sorted(answers, key=int) == [str(n) for n in range(30)]


def test_svamp_joins_body_and_question_and_writes_whole_numbers(tmp_path):
    examples = [
        {"Body": "A pack costs 76. If there is a discount of 25", "Question": "How much is it?", "Answer": 51.0},
        {"Body": "Tom has 3 apples.", "Question": "How many are half?", "Answer": 1.5},
    ]  # fmt: skip
    (tmp_path / "SVAMP.json").write_text(json.dumps(examples))
    main(["svamp", "--input", str(tmp_path / "SVAMP.json"), "--test-size", "1", "--output", str(tmp_path)])
    rows = {row["reward_model"]["ground_truth"]: row for row in prepared(tmp_path) + prepared(tmp_path, "test")}
    assert rows["51"]["extra_info"]["question"].endswith("If there is a discount of 25, how much is it?")
    assert rows["1.5"]["extra_info"]["question"] == "Tom has 3 apples. How many are half?"


def test_countdown_keeps_numbers_and_target(tmp_path):
    json_lines(tmp_path / "c.jsonl", [{"nums": [1, n, 3], "target": n, "solution": f"{n}*(3-1-1)"} for n in (5, 6)])
    main(["countdown", "--input", str(tmp_path / "c.jsonl"), "--test-size", "1", "--output", str(tmp_path)])
    (row,) = prepared(tmp_path)
    target = row["reward_model"]["ground_truth"]["target"]
    assert row["reward_model"]["ground_truth"] == {"target": target, "numbers": [1, target, 3]}
    assert f"[1, {target}, 3]" in row["prompt"][0]["content"]


def test_the_shared_datasets_are_prepared_and_load(tmp_path, shared_dir, tokenizer):
    data = shared_dir / "data"
    sources = {
        "gsm8k": "gsm8k",
        "svamp": "svamp/SVAMP.json",
        "countdown": "countdown",
        "math": "deepmath/deepmath_5k.jsonl",
    }
    counts = {}
    for name, source in sources.items():
        main([name, "--input", str(data / source), "--output", str(tmp_path / name)])
        files = [tmp_path / name / "train.parquet", tmp_path / name / "test.parquet"]
        counts[name] = len(RLDataset(files, tokenizer, max_prompt_length=9999))
    assert counts == {"gsm8k": 7473 + 1319, "svamp": 1000, "countdown": 4096 + 512, "math": 4994}


def test_arithmetic_results_are_right_and_splits_disjoint():
    train, test = generate_arithmetic(operands=3, max_value=12, ops="+-*", train_size=3000, test_size=300)
    for row in train + test:
        question = row["extra_info"]["question"]
        assert row["prompt"] == question
        assert str(eval(question.rstrip("="))) == row["reward_model"]["ground_truth"]
        assert row["extra_info"]["answer"] == f"#### {row['reward_model']['ground_truth']}"
    prompts = [row["prompt"] for row in train + test]
    assert len(set(prompts)) == 3300


def test_a_test_problem_is_not_in_training_in_another_order():
    train, test = generate_arithmetic(max_value=9, ops="+", train_size=60, test_size=20)

    def terms(rows):
        return {tuple(sorted(row["prompt"].rstrip("=").split("+"))) for row in rows}

    assert not terms(train) & terms(test)


def test_the_test_set_does_not_depend_on_the_size_of_the_training_set():
    small, large = (generate_arithmetic(train_size=size, test_size=50) for size in (10, 2000))
    assert small[1] == large[1]
    assert large[0][:10] == small[0]


def test_seeds_and_huge_problem_spaces():
    huge = {"operands": 12, "max_value": 10**9, "ops": "+-*", "train_size": 20, "test_size": 5}
    assert generate_arithmetic(**huge, seed=1) == generate_arithmetic(**huge, seed=1)
    assert generate_arithmetic(**huge, seed=1) != generate_arithmetic(**huge, seed=2)


def test_chat_style_asks_in_a_message(tmp_path):
    arguments = ["--digits", "1", "--ops", "+", "--train-size", "5", "--test-size", "5", "--style", "chat"]
    main(["arithmetic", *arguments, "--output", str(tmp_path)])
    (message,) = prepared(tmp_path)[0]["prompt"]
    assert message["content"] == prepared(tmp_path)[0]["extra_info"]["question"] + ' Output the result after "####".'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_value": 9, "ops": "+", "train_size": 100, "test_size": 1}, "distinct problems .* 101 were asked for"),
        ({"ops": "+/"}, r"operators '\+/' are unknown"),
        ({"operands": 1}, "operands=1"),
        ({"style": "verse"}, "style 'verse' is unknown"),
    ],
)
def test_impossible_arithmetic_is_an_error(options, message):
    with pytest.raises(DataError, match=message):
        generate_arithmetic(**options)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{1} \boxed{ {2}+\frac{1}{3} }", r"{2}+\frac{1}{3}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{1", None),
        ("nothing", None),
    ],
)
def test_last_boxed(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("name", "example", "message"),
    [
        ("gsm8k", {"question": "q", "answer": "no result"}, "row 0: column 'answer' has no '####'"),
        ("gsm8k", {"q": 1}, r"row 0: column 'question' must be a text, found None \(the columns are 'q'\)"),
        ("math", {"problem": "p", "solution": "unboxed"}, "row 0: column 'solution' has no"),
        ("svamp", {"Body": "b", "Question": "q", "Answer": "many"}, "row 0: column 'Answer' must be a number"),
        ("countdown", {"nums": ["1"], "target": 2}, "row 0: column 'nums / target' must be"),
    ],
)
def test_an_unusable_example_is_named(tmp_path, name, example, message):
    json_lines(tmp_path / "a.jsonl", [example] * 2)
    with pytest.raises(DataError, match=message):
        main([name, "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path)])
    assert not list(tmp_path.glob("*.parquet"))


def test_sources_that_do_not_exist_are_errors(tmp_path, monkeypatch):
    output = ["--output", str(tmp_path / "out")]
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        main(["gsm8k", "--input", str(tmp_path / "none.jsonl"), *output])
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="has no train split"):
        main(["gsm8k", "--input", str(tmp_path / "folder"), *output])
    with pytest.raises(DataError, match="leave --test-size out"):
        main(["gsm8k", "--input", str(tmp_path / "folder"), "--test-size", "3", *output])
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(DataError, match="needs the package 'datasets'"):
        main(["gsm8k", *output])


def test_the_hub_is_read_and_its_failure_explained(tmp_path, monkeypatch):
    (tmp_path / "datasets.py").write_text(
        "class Split(list):\n"
        "    def to_list(self): return list(self)\n"
        "def load_dataset(name, config):\n"
        "    if name != 'openai/gsm8k': raise ConnectionError('offline')\n"
        "    assert config == 'main'\n"
        "    row = {'question': 'q', 'answer': '#### 1'}\n"
        "    return {'train': Split([row]), 'test': Split([row])}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    assert main(["gsm8k", "--output", str(tmp_path)]) == 0
    assert len(prepared(tmp_path)) == 1
    with pytest.raises(DataError, match="'some/where' cannot be read from the hub: ConnectionError: offline"):
        main(["gsm8k", "--input", "some/where", "--output", str(tmp_path)])
    sys.modules.pop("datasets", None)
