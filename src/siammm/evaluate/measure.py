"""Measure a subject: open the sets, choose the protocols, run each with every seed, and keep what was found."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from siammm.core.errors import InputError, SiamMMError
from siammm.evaluate.datasets import open_task, open_transfer
from siammm.evaluate.fine_tuning import labelled_subset, settings_for
from siammm.evaluate.linear_probe import LINEAR
from siammm.evaluate.protocols import PROTOCOLS, Outcome, Protocol, changed, listed_images
from siammm.evaluate.subject import Subject, TableSubject
from siammm.evaluate.task import Progress, Task
from siammm.metrics.multilabel import check_classes
from siammm.runs.evaluation import Evaluation, Figure, Result, environment
from siammm.runs.models import Model
from siammm.settings.commands import EvaluateConfig


def evaluate(
    subject: Subject,
    config: EvaluateConfig,
    device: torch.device,
    *,
    progress: Progress | None = None,
    announce: Callable[[Task, Sequence[Protocol]], None] = lambda task, protocols: None,
) -> tuple[Evaluation, BaseException | None]:
    """Measure a subject; if a later protocol fails or is interrupted, the earlier results are kept.

    ``announce`` is called before the work starts. Returns what was measured, and what stopped it early, if anything.
    """
    _check_seeds(config.seeds)
    reading = config.reading
    task = open_task(subject, data=config.data, test=config.test, device=device, reading=reading, progress=progress)
    if config.transfer is not None:
        open_transfer(task, config.transfer, config.transfer_test)
    elif config.transfer_test is not None:
        raise InputError("--transfer-test is given without --transfer; give the training set as well.")
    protocols = choose(config.protocols, task)
    check(protocols, task, config)
    announce(task, protocols)
    results: list[Result] = []
    stopped: BaseException | None = None
    for protocol in protocols:
        try:
            results.append(measure(protocol, task, config))
        except (KeyboardInterrupt, SiamMMError, torch.OutOfMemoryError) as error:
            if not results:
                raise
            stopped = error
            break
    if task.set_aside:
        task.data["set_aside"] = task.set_aside
    found = Evaluation(
        subject=subject.record, data=task.data, test_images=task.test_images, seeds=list(config.seeds),
        results=results, environment=environment(shlex.join(["siammm", *sys.argv[1:]])),
        unfinished=[one.name for one in protocols[len(results) :]],
    )  # fmt: skip
    return found, stopped


def choose(names: Sequence[str] | None, task: Task) -> list[Protocol]:
    """The requested protocols, or the quick ones that apply; refuses what does not apply.

    Giving a set for transfer requests transfer.
    """
    if names is None:
        wanted = [p for p in PROTOCOLS.values() if p.quick or (p.needs == "transfer" and task.transfer is not None)]
        return [protocol for protocol in wanted if _obstacle(protocol, task) is None]
    if not names:
        raise InputError(f"There is nothing to measure; give --protocols one or more of {', '.join(PROTOCOLS)}.")
    if task.transfer is not None and "transfer" not in names:
        raise InputError("--transfer is given, but transfer is not among --protocols; add it, or leave --transfer out.")
    for name in names:
        if name not in PROTOCOLS:
            raise InputError(f"{name!r} is not a protocol; the protocols are {', '.join(PROTOCOLS)}.")
        if (obstacle := _obstacle(PROTOCOLS[name], task)) is not None:
            raise InputError(obstacle)
    return [PROTOCOLS[name] for name in dict.fromkeys(names)]


def _obstacle(protocol: Protocol, task: Task) -> str | None:
    """Why a protocol cannot be used here."""
    subject = task.subject
    if protocol.needs != "features" and isinstance(subject, TableSubject):
        return f"The protocol {protocol.name} needs an encoder, but {subject.name} is a table; leave it out."
    if protocol.needs == "run" and (not isinstance(subject, Model) or subject.mixture is None):
        return f"The protocol {protocol.name} is about a run's own clusters, but {subject.name} has none; leave it out."
    if protocol.needs == "transfer" and task.transfer is None:
        return "The protocol transfer needs another labelled set; give it with --transfer."
    return None


def check(protocols: Sequence[Protocol], task: Task, config: EvaluateConfig) -> None:
    """Refuse settings that a protocol would refuse later, after the others have done their work."""
    names, labels = {protocol.name for protocol in protocols}, task.train.labels
    n = len(labels)
    for number in config.k_means or () if "clustering" in names else ():
        if not 1 <= number <= n:
            raise InputError(f"k-means was asked for {number:,} clusters of {n:,} samples; ask for 1 to {n:,}.")
    if "semi" in names:
        if not config.label_lists and not config.label_shares:
            raise InputError("The protocol semi has no shares of labels; give --label-shares or --label-lists.")
        for path in config.label_lists:
            lacking = np.setdiff1d(labels, labels[listed_images(task.train, path)])
            if len(lacking):
                raise InputError(
                    f"The list {path} has no image of the class {task.class_names[lacking[0]]!r}, but each of the "
                    f"{task.n_classes} classes needs one; add some."
                )
        for share in config.label_shares if not config.label_lists else ():
            labelled_subset(labels, share, seed=0)
        changed(settings_for(1.0), config)
    if names & {"linear-paper", "transfer"}:
        changed(LINEAR, config)
    if "transfer" in names and task.transfer is not None:
        train, test = task.transfer
        if train.targets is not None and test.targets is not None:
            check_classes(train.targets, test.targets, class_names=train.class_names)


def measure(protocol: Protocol, task: Task, config: EvaluateConfig) -> Result:
    """Run a protocol with each seed, or once where nothing in it is random."""
    started = time.perf_counter()
    seeds = config.seeds if protocol.chance else config.seeds[:1]
    found: list[Outcome] = []
    for number, seed in enumerate(seeds):
        task.progress(protocol.name, number, len(seeds))
        found.append(protocol.run(task, config, seed, number == 0))
    first = found[0]
    names = dict.fromkeys(name for outcome in found for name in outcome.figures)
    return Result(
        protocol=protocol.name,
        recipe=protocol.recipe,
        settings=protocol.settings | first.settings,
        figures={name: Figure.of([one.figures[name] for one in found if name in one.figures]) for name in names},
        neutral=first.neutral,
        detail=first.detail,
        seconds=round(time.perf_counter() - started, 3),
    )


def _check_seeds(seeds: Sequence[int]) -> None:
    if not seeds:
        raise InputError("There are no seeds; give --seeds one or more whole numbers.")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"The seeds {', '.join(map(str, seeds))} repeat, which adds nothing; give different ones.")
    if odd := [seed for seed in seeds if not 0 <= seed < 2**31]:
        raise InputError(f"The seed {odd[0]} is out of range; seeds are from 0 to {2**31 - 1}.")
