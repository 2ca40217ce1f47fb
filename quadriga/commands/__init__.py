"""Everything behind `quadriga <word>`. A command may know every other room; nobody knows a command.

A command is imported only when it is called.
"""

from __future__ import annotations

COMMANDS = {
    "train": (
        "quadriga.trainer.main_ppo:_run_hydra",
        "run a PPO-family job with key=value …; without arguments, the quickstart",
    ),
    "sft": ("quadriga.trainer.supervised.entry:sft", "supervised fine-tuning on answers or conversations"),
    "rm": ("quadriga.trainer.supervised.entry:rm", "train a reward model on preference pairs"),
    "dpo": ("quadriga.trainer.supervised.entry:dpo", "optimise a policy directly on preference pairs"),
    "eval": ("quadriga.commands.evaluate:main", "score a model's answers to a dataset"),
    "dash": ("quadriga.commands.dash:main", "look at runs in the browser: curves, samples, time, live and across runs"),
    "runs": ("quadriga.commands.runs:list_runs", "list runs: where each of them stands"),
    "watch": ("quadriga.commands.watch:watch", "the live panel of a run that was started in another terminal"),
    "compare": ("quadriga.commands.runs:compare", "what differs between runs, and what came of it"),
    "samples": ("quadriga.commands.runs:show_samples", "read what a run asked and answered"),
    "tell": ("quadriga.commands.watch:tell", "tell a live run to save, validate, stop, or set a key"),
    "plan": ("quadriga.commands.plan:main", "print what a configuration amounts to, without running it"),
    "doctor": ("quadriga.commands.doctor:main", "check this machine, and say how to mend what is wrong"),
    "generate": ("quadriga.commands.generate:main", "complete prompts with a model, log-probs included"),
    "serve": ("quadriga.commands.serve:main", "a model behind an OpenAI-style API, with a page to talk to it"),
    "export": ("quadriga.commands.export:main", "a checkpoint's model as a Hugging Face folder"),
    "prep": ("quadriga.commands.prep:main", "turn a dataset into training and test files"),
    "completion": ("quadriga.commands.completion:main", "a script with which bash, zsh or fish completes all this"),
}
"""Word → where its function is (arguments in, exit code out), and what it does in a line."""
