"""The flags of every command, and what their help shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from siammm.cli import _COMMANDS, main, parse
from siammm.settings.commands import EmbedConfig, ExploreConfig, ReportConfig
from siammm.settings.fields import setting_homes
from siammm.settings.training import TrainConfig

# A new flag is a choice: people's scripts depend on every one of these. On-off flags also have their "--no-".
FLAGS = {
    "demo": "--random-state",
    "compare": "--output --overwrite",
    "train": """
        --output --overwrite --resume --resume-if-exists --allow-data-change --preset --method --image-key
        --label-key --loader --workers --max-bad-images --max-pixels --image-size --view-size --augmentation
        --crop-scale --backbone --weights --embedding-dim --hidden-dim --projector-layers --projector-norm
        --predictor-layers --predictor-hidden-dim --predictor-norm --predictor-noise --momentum-encoder
        --zero-init-residual --instance-loss --cluster-loss --cluster-weight --group-weight --group-levels
        --n-neighbours --temperature --size-weighting --concentration --concentration-dims --concentration-scale
        --normaliser --n-negatives --contrastive-temperature --contrastive-temperature-end --n-prototypes
        --prototype-temperature --queue-size --queue-after --n-components --more-components --cluster-after
        --group-after --n-groups --embeddings --centroids --n-init --em-steps --merge --merge-threshold --merge-floor
        --merge-share --epochs --batch-size --accumulate --optimiser --learning-rate --weight-decay --momentum
        --trust-coefficient --warmup-epochs --encoder-momentum --precision --compile --fused --probe
        --probe-every --image-cache --save-every --tensorboard --device --random-state
    """,
    "cluster": """
        --output --overwrite --encoder --image-size --key --id-column --label-column --family --n-components --n-groups
        --n-neighbours --temperature --assignment --size-weighting --merge --merge-threshold --merge-floor --merge-share
        --concentration --concentration-dims --small-sample-correction --concentration-shrinkage --covariance --init
        --n-init --max-iter --tol --device --backend --random-state --image-key --label-key --loader --workers
        --max-bad-images --max-pixels
    """,
    "embed": """
        --data --output --overwrite --what --image-size --device --image-key --label-key --loader --workers
        --max-bad-images --max-pixels
    """,
    "evaluate": """
        --data --test --protocols --transfer --transfer-test --seeds --encoder --image-size --k-means --label-shares
        --label-lists --epochs --batch-size --learning-rate --output --overwrite --device --image-key --label-key
        --loader --workers --max-bad-images --max-pixels
    """,
    "audit": """
        --data --labels --output --overwrite --key --id-column --label-column --mixture --n-neighbours --rounds
        --threshold --plant --show --device --random-state --image-key --label-key --loader --workers
        --max-bad-images --max-pixels
    """,
    "report": """
        --data --output --overwrite --open --audit --evaluation --compare --map --max-thumbnails --thumbnail-size
        --device --random-state --image-key --label-key --loader --workers --max-bad-images --max-pixels
    """,
    "explore": """
        --data --port --open --audit --evaluation --compare --map --device --random-state --image-key --label-key
        --loader --workers --max-bad-images --max-pixels
    """,
    "export": """
        --output --overwrite --formats --encoder --data --hub --device --image-key --label-key --loader --workers
        --max-bad-images --max-pixels
    """,
    "sort": "--to --by --copy --data",
    "bench": """
        --preset --batch-size --seconds --compile --output --overwrite --device --random-state
    """,
}
ON_OFF = {
    "--overwrite", "--momentum-encoder", "--zero-init-residual", "--size-weighting", "--normaliser", "--tensorboard",
    "--open", "--copy", "--resume-if-exists", "--allow-data-change", "--compile", "--fused",
    "--small-sample-correction",
}  # fmt: skip
AUTOMATIC = {"--compile", "--fused", "--small-sample-correction"}  # on or off by themselves where neither is given


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "80")

    def shown(*arguments: str) -> str:
        assert main([*arguments]) == 0
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)

    return shown


def flags_in(text: str) -> list[str]:
    return re.findall(r"^\W (--[a-z][a-z-]+)", text, flags=re.MULTILINE)


def test_every_command_is_here() -> None:
    assert set(FLAGS) == set(_COMMANDS)


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags(command: str, help_of: Any) -> None:
    text = help_of(command, "--help-all")
    flags = flags_in(text)
    assert set(flags) == set(FLAGS[command].split())
    assert len(flags) == len(set(flags))
    for flag in ON_OFF & set(flags):
        assert f"{flag}, --no-{flag[2:]}" in text
    text = " ".join(text.replace("│", " ").split())
    for flag in flags:
        assert re.search(rf"{flag}\b.*? [A-Za-z\"][^│]+?\(default", text), f"{flag} has no help"
    for words in ("None", "True", "False", "INT", "FLOAT", "STR", "(default: )"):  # Python's, not a user's
        assert not re.search(rf"(?<![\w-]){re.escape(words)}(?![\w-])", text), words


@pytest.mark.parametrize("command", FLAGS)
def test_the_help_is_short_and_says_where_the_rest_is(command: str, help_of: Any) -> None:
    text, whole = help_of(command, "--help"), help_of(command, "--help-all")
    shown, every = flags_in(text), flags_in(whole)
    assert len(shown) <= 12
    assert [flag for flag in every if flag in shown] == shown
    assert (f"siammm {command} --help-all" in " ".join(text.split())) == (shown != every)
    assert "--help-all" not in whole


def test_the_help_names_the_kind_of_an_optional_value(help_of: Any) -> None:
    assert re.search(r"--output PATH\b", help_of("cluster", "--help"))
    text = help_of("evaluate", "--help-all")
    for flag in ("--protocols NAME [NAME ...]", "--k-means N [N ...]", "--label-shares NUMBER [NUMBER ...]"):
        assert flag in text
    assert "EVALUATION [EVALUATION ...]" in help_of("compare", "--help")
    assert "--init {k-means++,random}|PATH" in help_of("cluster", "--help-all")


@pytest.mark.parametrize("command", FLAGS)
def test_no_line_of_the_help_is_wider_than_the_terminal(command: str, help_of: Any) -> None:
    usage, *lines = help_of(command, "--help-all").splitlines()
    assert usage.startswith(f"usage: siammm {command} ")
    assert max(map(len, lines)) <= 80


def test_the_help_of_train_shows_eleven_settings_in_groups(help_of: Any) -> None:
    text = help_of("train", "--help")
    assert len(flags_in(text)) == 11
    titles = re.findall(r" (\w+) options ", text)
    assert titles == ["data", "learning", "cluster", "optimisation", "run"]
    assert re.findall(r" (\w+) options ", help_of("train", "--help-all")) == titles


def test_every_setting_of_train_has_its_flag_by_the_same_word(help_of: Any) -> None:
    words = [flag.removeprefix("--").replace("-", "_") for flag in flags_in(help_of("train", "--help-all"))]
    assert ["data", *words] == list(setting_homes())


def test_the_help_of_a_preset_prints_its_numbers(help_of: Any) -> None:
    text = " ".join(help_of("train", "--preset", "imagenet-200", "--help-all").replace("│", " ").split())
    for flag, value in {
        "epochs": "200", "batch-size": "4096", "learning-rate": "0.5", "weight-decay": "1e-06", "momentum": "0.9",
        "n-components": "100000", "merge-threshold": "-1.2", "n-neighbours": "5", "temperature": "0.02",
        "concentration-dims": "150", "hidden-dim": "4096", "backbone": "resnet50",
    }.items():  # fmt: skip
        assert re.search(rf"--{flag} [^│]+?\(default: {re.escape(value)}\)", text), flag


@pytest.mark.parametrize("flag", sorted(ON_OFF - {"--open", "--copy", "--small-sample-correction"}))
@pytest.mark.parametrize("start", [[], ["--method", "swav"]])
def test_flags_turn_on_and_off_from_either_default(flag: str, start: list[str]) -> None:
    name = flag[2:].replace("-", "_")
    for given, value in ((flag, True), (f"--no-{flag[2:]}", False)):
        config = parse(["train", "x", *start, given])
        assert isinstance(config, TrainConfig)
        home = setting_homes()[name]
        assert getattr(config if home is None else getattr(config, home), name) is value


def test_values_are_parsed() -> None:
    assert parse(["embed", "r"]) == EmbedConfig(subject="r")
    assert parse(["report", "r", "--no-open", "--map", "umap"]) == ReportConfig(run=Path("r"), open=False, map="umap")
    assert parse(["explore", "r", "--port", "0", "--open"]) == ExploreConfig(run=Path("r"), port=0)


def test_a_flag_with_an_automatic_default_is_none_on_or_off() -> None:
    assert set(AUTOMATIC) <= ON_OFF
    for flags, values in (
        ([], (None, None)), (["--compile"], (True, None)), (["--no-compile", "--fused"], (False, True)),
    ):  # fmt: skip
        found = parse(["train", "x", *flags]).optimisation
        assert (found.compile, found.fused) == values
    assert parse(["cluster", "x"]).small_sample_correction is None
    assert parse(["cluster", "x", "--no-small-sample-correction"]).small_sample_correction is False
    assert parse(["bench", "--compile"]).compile is True


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from siammm.cli import main; main(['train', '--help']); main(['cluster', '--help-all']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'sklearn', 'scipy', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
